"""The page of the command line shows every subcommand's --help. What it prints: `tests/test_documents.py`."""

import re
from pathlib import Path

from refops import cli

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "command_line.md"


def test_every_subcommand_is_on_the_page(capsys):
    assert cli.main(["--help"]) == 0
    names = re.findall(r"^    (\w+) ", capsys.readouterr().out.split("\noptions:")[0], re.MULTILINE)
    assert {"report", "check", "golden"} <= set(names)
    shown = re.findall(r"^refops (\w+) --help", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert shown == names
