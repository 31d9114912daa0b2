"""Files of conversations as people have them: odd characters, and fields of the wrong kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.data.chat_prepare import _named
from meshwright.data.conversations import read_records
from meshwright.errors import UserError


def test_a_line_ends_where_json_lines_end(tmp_path: Path) -> None:
    """Other characters that break lines in a text may stand in a JSON string as they are."""
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
    """Also where the folder has no template of its own, which is when one is named."""
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": {"content": "<s>"}}))
    (tmp_path / "mine.jinja").write_text("{{ bos_token }}{{ eos_token }}")
    assert _named(str(tmp_path / "mine.jinja"), tmp_path).special == {"eos_token": "</s>", "bos_token": "<s>"}
