"""Files of conversations as users have them: odd characters, and fields of the wrong kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.data.chat_template import named_template
from meshwright.data.conversations import read_records
from meshwright.data.packed import MASK, packed_datasets
from meshwright.data.token_file import METADATA_FORMAT
from meshwright.errors import UserError
from tests.support.token_files import write_documents


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    """Other characters that break lines in a text may appear unescaped in a JSON string."""
    said = "one\u2028two\u0085three"
    path = tmp_path / "said.jsonl"
    path.write_text(json.dumps({"prompt": said, "completion": "yes"}, ensure_ascii=False) + "\n", encoding="utf-8")
    ((_, record),) = read_records(path)
    assert record.messages[0]["content"] == said


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"instruction": 5, "output": "c"}, "must be texts"),
        ({"instruction": "a", "output": "c", "history": [1]}, "history must be a list of pairs"),
        ({"instruction": "a", "output": "c", "history": [["b", 2]]}, "must be texts"),
        ({"messages": [{"role": ["user"], "content": "a"}]}, "is not one of"),
    ],
)
def test_fields_of_the_wrong_kind_get_a_sentence(value: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "said.jsonl"
    path.write_text(json.dumps(value))
    with pytest.raises(UserError, match=sentence):
        list(read_records(path))


def test_a_named_template_has_the_folder_s_special_tokens(tmp_path: Path) -> None:
    """The folder need not have a template. Users name one when it has none."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": {"content": "<s>"}}))
    (tmp_path / "mine.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    assert named_template(str(tmp_path / "mine.jinja"), tmp_path).special == {"eos_token": "</s>", "bos_token": "<s>"}


def test_conversations_of_different_tokenizers_are_refused(tmp_path: Path) -> None:
    """Otherwise nothing would show that the same ids mean different texts."""
    prefixes = [str(tmp_path / name) for name in ("one", "two")]
    for number, prefix in enumerate(prefixes):
        write_documents(Path(prefix), [np.arange(5)])
        write_documents(Path(prefix + MASK), [np.ones(5, np.uint8)])
        metadata = {"format": METADATA_FORMAT, "version": 1, "vocab_size": 9, "eod": 0, "chat": "chat"}
        metadata |= {"tokenizer": "t.json", "tokenizer_digest": f"digest {number}"}
        Path(f"{prefix}.json").write_text(json.dumps(metadata))
    given = ([1.0, 0.0, 0.0], 16, 0, False, True, {"chat"})
    with pytest.raises(UserError, match="one and .*two were made with different tokenizers"):
        packed_datasets(prefixes, *given)
    assert packed_datasets(prefixes[:1], *given)[0] is not None
