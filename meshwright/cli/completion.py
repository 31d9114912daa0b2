"""`meshwright completion`: a script for bash, zsh or fish that knows every command, option and config key. No torch."""

from __future__ import annotations

import argparse
import importlib
import json
import keyword
from collections.abc import Iterator

from meshwright.config.load import config_keys

EXAMPLES = """example:
  meshwright completion bash > ~/.local/share/bash-completion/completions/meshwright
  meshwright completion zsh > "${fpath[1]}/_meshwright"
  meshwright completion fish > ~/.config/fish/completions/meshwright.fish"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to complete in")


def run(args: argparse.Namespace) -> None:
    scripts = {"bash": bash, "zsh": zsh, "fish": fish}
    text = scripts[args.shell]()
    print(json.dumps({"shell": args.shell, "script": text}) if args.json else text)


def options() -> dict[str, list[str]]:
    """Return the options of each command, with the words that its arguments may be."""
    from meshwright.cli.main import COMMANDS, MIXED

    by_command = {}
    for name in COMMANDS:
        module = importlib.import_module(f"meshwright.cli.{name}{'_' if keyword.iskeyword(name) else ''}")
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        words = [*dict.fromkeys(["--json", *_words(parser)])]
        by_command[name] = words + (["layout=auto"] if name == "train" else []) + (KEYS if name in MIXED else [])
    return by_command


def _words(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the options of a parser and of its actions, and the choices of its arguments."""
    # argparse has no public way to list the arguments of a parser.
    for action in parser._actions:
        yield from action.option_strings if "-h" not in action.option_strings else ["--help"]
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield name
                yield from _words(inner)
        elif not action.option_strings and action.choices:
            yield from map(str, action.choices)


# A placeholder for all config keys, which the scripts would otherwise repeat for every command.
KEYS = ["@keys"]


def _table() -> tuple[str, str, list[tuple[str, str]]]:
    """Return all commands, all config keys, and for each command its words. Words are joined by blanks."""
    unique = {name: list(dict.fromkeys(words)) for name, words in options().items()}
    return " ".join(unique), " ".join(config_keys()), [(name, " ".join(words)) for name, words in unique.items()]


def bash() -> str:
    """Return the completion script for bash."""
    commands, keys, rows = _table()
    cases = "\n".join(f'    {name}) words="{words.replace("@keys", "$keys")}" ;;' for name, words in rows)
    return f"""# bash completion of meshwright
_meshwright() {{
  local cur="${{COMP_WORDS[COMP_CWORD]}}" words=""
  local keys="{keys}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands} --help --version" -- "$cur"))
    return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur") $(compgen -f -- "$cur"))
  case "${{COMPREPLY[0]}}" in *=) compopt -o nospace ;; esac
}}
complete -o filenames -F _meshwright meshwright"""


def zsh() -> str:
    """Return the completion script for zsh."""
    commands, keys, rows = _table()
    cases = "\n".join(f"    {name}) words=({words.replace('@keys', '$keys')}) ;;" for name, words in rows)
    return f"""#compdef meshwright
# zsh completion of meshwright
_meshwright() {{
  local -a keys words
  keys=({keys})
  if (( CURRENT == 2 )); then
    compadd -- {commands} --help --version
    return
  fi
  local command=${{${{(z)BUFFER}}[2]}}
  case $command in
{cases}
  esac
  compadd -S '' -- ${{(M)words:#*=}}
  compadd -- ${{words:#*=}}
  _files
}}
compdef _meshwright meshwright"""


def fish() -> str:
    """Return the completion script for fish."""
    commands, keys, rows = _table()
    lines = [
        "# fish completion of meshwright",
        f"set -l commands {commands}",
        'complete -c meshwright -n "not __fish_seen_subcommand_from $commands" -f -a "$commands"',
    ]
    for name, words in rows:
        here = f'"__fish_seen_subcommand_from {name}"'
        for word in words.split():
            if word.startswith("--"):
                lines.append(f"complete -c meshwright -n {here} -l {word[2:]}")
            elif word == "@keys":
                lines.append(f'complete -c meshwright -n {here} -a "{keys}"')
            else:
                lines.append(f"complete -c meshwright -n {here} -a {word}")
    return "\n".join(lines)
