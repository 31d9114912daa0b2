"""Run lm-eval tasks with our models, on any layout.

Every rank runs the harness on the same tasks, and all ranks compute the model's answers together.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.data.chat_template import ChatTemplate, TemplateError, special_tokens
from meshwright.data.tokenizers import Tokenizer
from meshwright.engine.context import Context
from meshwright.errors import UserError, one_line
from meshwright.infer.generate import generate_all
from meshwright.infer.scoring import Continuation, scores

MISSING = "tasks are run by lm-eval: pip install meshwright[tasks]"


class HarnessModel:
    """The methods that lm-eval calls on a model. `run_tasks` combines it with lm-eval's base class, which is imported
    only then."""

    def __init__(
        self, ctx: Context, modules: Sequence[nn.Module], tokenizer: Tokenizer, folder: Path, ends: set[int],
        template: ChatTemplate | None, batch: int,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ctx = ctx
        self.modules = list(modules)
        self.words = tokenizer
        self.ends, self.template, self.batch = ends, template, batch
        self.max_length, self.max_gen_toks = ctx.config.model.seq, 256
        # Texts begin with the tokenizer's first token or, if it has none, with the end of a document.
        named = special_tokens(folder).get("bos_token")
        begins = [] if named is None else tokenizer.encode(named)
        self.begin = begins[0] if len(begins) == 1 else tokenizer.eod

    @property
    def eot_token_id(self) -> int:
        return self.words.eod

    @property
    def prefix_token_id(self) -> int:
        return self.begin

    @property
    def tokenizer_name(self) -> str:
        return self.words.recipe.digest

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **unused: Any) -> list[int]:
        """Encode like the model's tokenizer, but do not add the first token if the text has it already."""
        plain = self.words.encode(string)
        if add_special_tokens is False or (add_special_tokens is None and plain[:1] == [self.begin]):
            return plain
        return self.words.encode_with_special_tokens(string)

    def _loglikelihood_tokens(self, requests: list[Any], **unused: Any) -> list[tuple[float, bool]]:
        texts = [Continuation((before + after)[-(self.max_length + 1) :], len(after)) for _, before, after in requests]
        return [(score.logp, score.greedy) for score in scores(self.ctx, self.modules, texts)]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts. Texts that are longer than the model's context are split into windows."""
        from lm_eval import utils

        windows, text_of = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                windows.append((None, *utils.make_disjoint_window(window)))
                text_of.append(number)
        sums = [0.0] * len(requests)
        for number, (logp, _) in zip(text_of, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += logp
        return sums

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate texts, each cut before the first of the stop words in its request."""
        from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

        model, texts = self.ctx.config.model, []
        self._check_writes()
        # Requests with the same settings are generated together.
        for kind in {repr(request.args[1]): request.args[1] for request in requests}.values():
            alike = [number for number, request in enumerate(requests) if request.args[1] == kind]
            wanted = normalize_gen_kwargs(kind, self.max_gen_toks)
            until = [word for word in handle_stop_sequences(wanted.pop("until", None), None) if word]
            most = int(wanted["max_gen_toks"])
            if not 0 < most < self.max_length:
                room = f"the model's context has {self.max_length}"
                raise UserError(f"a task asks for {most} tokens, and {room}: leave that task out")
            prompts = [self.tok_encode(requests[n].args[0])[-(self.max_length - most) :] for n in alike]
            drawing = (float(wanted.get("temperature", 0.0)), float(wanted.get("top_p", 1.0)), 0)
            settings = (*drawing, self.ends, self.batch, self._stops(until))
            answers = generate_all(self.modules[0], model, prompts, most, *settings)
            texts += [(number, self._cut_at_stop(tokens, until)) for number, tokens in zip(alike, answers, strict=True)]
        return [text for _, text in sorted(texts)]

    def _check_writes(self) -> None:
        layout = self.ctx.config.layout
        if layout.pp > 1 or layout.cp > 1 or layout.sequence_parallel:
            raise UserError(
                "a task that writes text needs a whole model on each tensor-parallel group: set layout.pp=1, "
                "layout.cp=1 and layout.sequence_parallel=false"
            )

    def _stops(self, until: list[str]) -> Callable[[list[int]], bool]:
        return lambda tokens: any(word in self.words.decode(tokens) for word in until)

    def _cut_at_stop(self, tokens: list[int], until: list[str]) -> str:
        text = self.words.decode([token for token in tokens if token not in self.ends])
        for word in until:
            text = text.split(word)[0]
        return text

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if self.template is None:
            raise UserError("the model has no chat template: leave --chat out, or name one with --template")
        try:
            return self.template.render(chat_history, begins=add_generation_prompt)
        except TemplateError:  # Some templates reject a system message.
            return self.template.render([turn for turn in chat_history if turn["role"] != "system"], None, True)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return None if self.template is None or chat_template is False else self.template.text


def run_tasks(
    make: Callable[[type], Any], tasks: Sequence[str], folders: Sequence[str], shots: int | None, limit: int | None,
    chat: bool, quiet: bool,
) -> dict[str, Any]:  # fmt: skip
    """Run tasks and return the harness's results by task. `make` receives the class of the model to create."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.api.model import TemplateLM
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise UserError(MISSING) from None
    if quiet:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model = make(type("HarnessModel", (HarnessModel, TemplateLM), {}))
    try:
        manager = TaskManager(include_path=list(folders) or None)
        unknown = [task for task in tasks if not manager.match_tasks([task])]
    except (OSError, ValueError) as error:
        raise UserError(f"the tasks of {', '.join(folders)} can't be read ({one_line(str(error))})") from None
    if unknown:
        raise UserError(f"lm-eval knows no task {unknown[0]}: name others, or their folder with --task-folder")
    outcome = simple_evaluate(
        model, tasks=list(tasks), num_fewshot=shots, limit=limit, task_manager=manager, apply_chat_template=chat,
        log_samples=False, bootstrap_iters=0 if quiet else 1000,
    )  # fmt: skip
    if outcome is None:  # The harness returns results on the first rank only.
        return {}
    return {"results": outcome["results"], "versions": outcome["versions"], "samples": outcome["n-samples"]}
