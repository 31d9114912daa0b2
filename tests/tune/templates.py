"""Chat templates in the published formats of model families, and conversations with learned text between « and »."""

from __future__ import annotations

CHATML = """{%- if messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
{%- for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """{{ bos_token }}{% for m in messages %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

LLAMA2 = """{% set offset = 1 if messages[0]['role'] == 'system' else 0 %}
{%- for m in messages[offset:] %}
{%- if m['role'] == 'user' %}
{%- set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' if offset and loop.first else '' %}
{{- bos_token + '[INST] ' + system + m['content'] | trim + ' [/INST]' }}
{%- elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}{% endif %}
{%- endfor %}"""

MISTRAL = """{{ bos_token }}{% for m in messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m['role'] == 'user' %}{{ '[INST]' + m['content'] + '[/INST]' }}
{%- else %}{{ m['content'] + eos_token }}{% endif %}
{%- endfor %}"""

ZEPHYR = """{% for m in messages %}
{% if m['role'] == 'user' %}
{{ '<|user|>\\n' + m['content'] + eos_token }}
{% elif m['role'] == 'system' %}
{{ '<|system|>\\n' + m['content'] + eos_token }}
{% elif m['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + m['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>\\n' }}{% endif %}
{% endfor %}"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}
{%- endif %}{% for m in messages %}
{%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{- '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"""

PHI3 = """{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

VICUNA = """{% for m in messages %}
{%- if m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}
{%- else %}{{ 'ASSISTANT: ' + m['content'] + eos_token }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"""

DEEPSEEK = """{{ bos_token }}{% for m in messages %}
{%- if m['role'] == 'user' %}{{ '<｜User｜>' + m['content'] }}
{%- elif m['role'] == 'assistant' %}{{ '<｜Assistant｜>' + m['content'] + '<｜end▁of▁sentence｜>' }}
{%- else %}{{ m['content'] }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"""

MARKED = """{% for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>' }}{%- generation %}{{ m.content + eos_token }}{%- endgeneration %}
{%- else %}{{ '<|' + m.role + '|>' + m.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

HERMES = """{% if tools %}{{ '<|im_start|>system\\n<tools>' + tools | tojson + '</tools><|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|im_start|>tool\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.tool_calls is defined %}
{{- '<|im_start|>assistant\\n' }}
{%- for call in m.tool_calls %}{{ '<tool_call>' + call.function | tojson + '</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

COMMAND = """{{ bos_token }}{% for m in messages %}
{%- set who = {'user': 'USER', 'assistant': 'CHATBOT', 'system': 'SYSTEM'}[m['role']] %}
{{- '<|START_OF_TURN_TOKEN|><|' + who + '_TOKEN|>' + m['content'].strip() + '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}"""

# Drops the thoughts of all answers but the last, as templates of thinking models do.
THINKING = """{% for m in messages %}
{%- set said = m.content if loop.last or m.role != 'assistant' else m.content.split('</think>')[-1] %}
{{- '<|im_start|>' + m.role + '\\n' + said + '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TALK = [("user", "Hi"), ("assistant", "Hello."), ("user", "Why?"), ("assistant", "So.")]
WITH_SYSTEM = [("system", "Be brief."), *TALK]

# name: (template, messages, text with the learned parts between the signs)
CASES: dict[str, tuple[str, list[tuple[str, str]], str]] = {
    "chatml": (CHATML, TALK,
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        "«Hello.<|im_end|>»\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n«So.<|im_end|>»\n"),
    "llama3": (LLAMA3, WITH_SYSTEM,
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>"
        "\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«Hello.<|eot_id|>»<|start_header_id|>user"
        "<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n«So.<|eot_id|>»"),
    "llama2": (LLAMA2, WITH_SYSTEM,
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]« Hello. </s>»<s>[INST] Why? [/INST]« So. </s>»"),
    "mistral": (MISTRAL, TALK, "<s>[INST]Hi[/INST]«Hello.</s>»[INST]Why?[/INST]«So.</s>»"),
    "zephyr": (ZEPHYR, WITH_SYSTEM,
        "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\n«Hello.</s>»\n<|user|>\nWhy?</s>\n<|assistant|>\n"
        "«So.</s>»\n"),
    "gemma": (GEMMA, TALK,
        "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n«Hello.<end_of_turn>»\n<start_of_turn>user\n"
        "Why?<end_of_turn>\n<start_of_turn>model\n«So.<end_of_turn>»\n"),
    "phi3": (PHI3, WITH_SYSTEM,
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n«Hello.<|end|>»\n<|user|>\nWhy?<|end|>\n"
        "<|assistant|>\n«So.<|end|>»\n"),
    "vicuna": (VICUNA, TALK, "USER: Hi ASSISTANT: «Hello.</s>»USER: Why? ASSISTANT: «So.</s>»"),
    "deepseek": (DEEPSEEK, TALK,
        "<s><｜User｜>Hi<｜Assistant｜>«Hello.<｜end▁of▁sentence｜>»<｜User｜>Why?<｜Assistant｜>"
        "«So.<｜end▁of▁sentence｜>»"),
    "marked": (MARKED, TALK, "<|user|>Hi<|assistant|>«Hello.</s>»<|user|>Why?<|assistant|>«So.</s>»"),
    "command": (COMMAND, TALK,
        "<s><|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"
        "«Hello.<|END_OF_TURN_TOKEN|>»<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Why?<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>«So.<|END_OF_TURN_TOKEN|>»"),
}  # fmt: skip
