"""`meshwright.load`: a trained model in this process, as a module of torch that also writes text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, overload

from torch import Tensor, nn

from meshwright.config.rules import READING_RULES, check
from meshwright.config.sections import Config
from meshwright.engine.context import build_context
from meshwright.errors import UserError
from meshwright.infer.evaluate import config_with, modules_with, open_model
from meshwright.infer.generate import encodes, generate_all, logits_of
from meshwright.infer.reading import resolve, sections_of
from meshwright.infer.texts import check_drawing, end_tokens, text_ids, tokenizer_for
from meshwright.launch.processes import ProcessPlace, enter, find_place
from meshwright.models.graph_stage import GraphStage
from meshwright.show.units import count

Prompts = list[str] | tuple[str, ...]  # no plain sequence, because a text is one too


class LoadedModel(nn.Module):
    """A whole trained model in one process. `meshwright.load` makes it.

    Its forward and its gradients are those of an ordinary module, so hooks, optimizers and other tools of torch work.

    Attributes:
        config: the config of the run, as this process uses it.
        source: the folder that the weights came from.
        tokenizer: the tokenizer that the model was trained with, or None.
    """

    def __init__(self, source: Path, config: Config, module: nn.Module, tokenizer: Any) -> None:
        super().__init__()
        self.source, self.config, self.tokenizer = source, config, tokenizer
        self.net = module

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor | None = None) -> Tensor:
        """Return the logits [sequences, tokens, vocabulary] at every token of `input_ids` [sequences, tokens].

        Only an encoder-decoder takes `decoder_input_ids`, and the logits are theirs.

        >>> model = meshwright.load("runs/mine")
        >>> ids = torch.tensor([model.tokenizer.encode("def main(")])
        >>> model(ids).argmax(-1)
        """
        two_stacks = isinstance(self.net, GraphStage) and encodes(self.net)
        if two_stacks != (decoder_input_ids is not None):
            raise UserError(
                f"{self.source} is an encoder-decoder: give decoder_input_ids too" if two_stacks
                else f"{self.source} has no decoder beside an encoder: leave decoder_input_ids out"
            )  # fmt: skip
        longest = max(tokens.shape[1] for tokens in (input_ids, decoder_input_ids) if tokens is not None)
        model = self.config.model
        # Relative positions, as an encoder-decoder has them, have no end.
        if longest > model.seq and not two_stacks:
            raise UserError(f"{longest} tokens are more than the model's {model.seq}: give shorter sequences")
        return logits_of(self.net, input_ids, decoder_input_ids)[..., : model.vocab]

    @overload
    def generate(
        self, prompt: str, *, max_tokens: int = ..., temperature: float = ..., top_p: float = ..., seed: int = ...,
        batch: int = ...,
    ) -> str: ...  # fmt: skip
    @overload
    def generate(
        self, prompt: Prompts, *, max_tokens: int = ..., temperature: float = ..., top_p: float = ..., seed: int = ...,
        batch: int = ...,
    ) -> list[str]: ...  # fmt: skip
    def generate(
        self, prompt: str | Prompts, *, max_tokens: int = 64, temperature: float = 0.0, top_p: float = 1.0,
        seed: int = 0, batch: int = 8,
    ) -> str | list[str]:  # fmt: skip
        """Return the text that the model writes after a prompt, or a list of texts after a list of prompts.

        The options are those of `meshwright generate`: temperature 0 takes the likeliest token, `batch` prompts run
        together, and prompt n draws with the seed `seed` + n.

        >>> model = meshwright.load("runs/mine")
        >>> model.generate("def main(", max_tokens=20)
        >>> model.generate(["import ", "class "], temperature=0.8, top_p=0.9)
        """
        check_drawing(temperature, top_p, seed, mark="")
        if min(max_tokens, batch) < 1:
            raise UserError("max_tokens and batch must be at least 1")
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        ids = [text_ids(self.source, self.config, self._writer(), text) for text in prompts]
        ends, was_training = end_tokens(self.source, self.tokenizer), self.net.training
        drawing = (temperature, top_p, seed)
        try:
            tokens = generate_all(self.net, self.config.model, ids, max_tokens, *drawing, ends, batch)
        finally:
            self.net.train(was_training)
        texts = [self.tokenizer.decode(each[:-1] if each[-1] in ends else each) for each in tokens]
        return texts[0] if isinstance(prompt, str) else texts

    def _writer(self) -> Any:
        """Return the tokenizer, or raise if this model can't write text."""
        if not self.config.model.kind_facts.writes_text:
            raise UserError(f"{self.source} is an encoder, which predicts masked tokens and no text: call the model")
        if self.config.objective_facts.fills_blanks:
            raise UserError(f"{self.source} fills in blanks: use `meshwright generate`")
        if self.tokenizer is None:
            raise UserError("no tokenizer is known for this model: name one with load(..., tokenizer=...)")
        return self.tokenizer

    def extra_repr(self) -> str:
        total, config = sum(parameter.numel() for parameter in self.parameters()), self.config
        return f"{self.source}: {count(total)} parameters, {config.train.precision}, {config.model.seq} tokens"


def load(
    source: str | Path, *, precision: str | None = None, device: str = "auto", tokenizer: str | None = None
) -> LoadedModel:
    """Return the model of a run, a checkpoint or a Hugging Face folder, whole and in this process.

    >>> model = meshwright.load("runs/mine")            # or "runs/mine@100", or a folder that transformers wrote
    >>> logits = model(torch.tensor([[5, 17, 2]]))      # [sequences, tokens, vocabulary]
    >>> print(model.generate("def main(", max_tokens=40))
    >>> meshwright.load("runs/mine", precision="fp32", device="cpu")

    Adapters are merged into the weights. `precision` and `device` are those of the run by default; other precisions are
    fp32, bf16, fp16 and fp64. `tokenizer` names another tokenizer than the model's own.
    """
    found = resolve(str(source))
    words = [f"run.device={device}", *([f"train.precision={precision}"] if precision else [])]
    weights, raw = open_model(found)
    config = config_with(raw, sections_of(words, 1))
    check(config, 1, READING_RULES)
    alone = ProcessPlace(local_rank=find_place().local_rank)
    at, _ = enter(alone, config.run.device, config.comm.backend, config.comm.timeout)
    modules = modules_with(build_context(config, 0, 1, at, 1), weights)
    return LoadedModel(Path(found), config, modules[0], tokenizer_for(Path(found), config, tokenizer)).eval()
