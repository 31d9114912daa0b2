"""A small random Llama whose tokens are the words w1 to w59, with a chat template in which <e> ends a turn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.interop.hf_models import save

TEMPLATE = (
    "{% for m in messages %}{{ {'user': 'w5', 'assistant': 'w6', 'system': 'w7'}[m.role] }} {{ m.content }} <e> "
    "{% endfor %}{% if add_generation_prompt %}w6 {% endif %}"
)


def make_word_model(folder: Path) -> Path:
    """Save the model with its tokenizer and template, and return the folder."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    transformers.logging.disable_progress_bar()
    save("llama2", folder, std=0.5)
    made = Tokenizer(models.WordLevel({"<e>": 0, **{f"w{n}": n for n in range(1, 60)}, "</s>": 60}, unk_token="w1"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece(prefix="##")
    made.add_special_tokens(["<e>", "</s>"])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 60}))
    return folder
