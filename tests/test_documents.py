"""What the documents say is true: every code block runs, its output is the one shown, every link leads somewhere.

How a block is run: `running_documents.py`. The documents are all Markdown files of the repository.
"""

import re
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt

from refops import ACTIVATIONS
from refops.oracle.conventions import CONVENTIONS
from refops.survey import SCALINGS
from running_documents import ROOT, Document, DocumentError, blocks_of, documents, extras, make_targets

DOCUMENTS = documents()


def read(path):
    return (ROOT / path).read_text()


# --- code -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS)
def test_every_block_is_of_a_kind_that_is_run(path):
    blocks_of(read(path))


def has_code(text):
    """Whether there is something to run, or a block that nothing would run, for which the run fails."""
    try:
        return any(block.language != "text" for block in blocks_of(text))
    except DocumentError:
        return True


WITH_CODE = [path for path in DOCUMENTS if has_code(read(path))]


#: Whose code `make test` runs; `make test-all` runs that of all documents.
MAIN = ("README.md",)


@pytest.mark.parametrize(
    "path", [path if path in MAIN else pytest.param(path, marks=pytest.mark.full) for path in WITH_CODE]
)
def test_document_runs(path, tmp_path):
    skipped = Document(path, read(path), tmp_path).run()
    if skipped:
        pytest.skip("all but " + "; ".join(skipped))


def test_documents_with_code_are_the_known_kind():
    """The list above is not empty by mistake, and the main page is in it."""
    assert {"README.md", "fuser/README.md", "cuda_kernels/README.md", "refops/oracle/README.md"} <= set(WITH_CODE)


#: A document that must fail -> what the error says.
WRONG = {
    "output": ("```python\nprint(2)\n```\n\n```text\n3\n```\n", "printed\n2"),
    "output_not_shown": ("```python\nprint(2)\n```\n\nText.\n", "printed\n2"),
    "exception": ("```python\nx = 1\nx.missing\n```\n", 'File "document.md", line 3'),
    "sh": ("```sh\ntrue\nfalse\ntrue\n```\n", "exit code 1"),
    "sh_output": ("```sh\necho a\n```\n\n```text\nb\n```\n", "printed\na"),
    "sh_unset": ("```sh\necho $MISSING\n```\n", "MISSING"),
    "target": ("```sh\nmake no_such_target\n```\n", "no_such_target"),
    "extra": ("```sh\npip install '.[no_such_extra]'\n```\n", "no_such_extra"),
    "cpp": ("```cpp\nint main() { int unused = 3; }\n```\n", "unused"),
    "unused": ("```python\n# tool.py\nprint(1)\n```\n", "no later block uses it"),
    "fragment": ("```cpp\nint a;\n```\n", "without a harness"),
    "language": ("```py\nx\n```\n", "a block of 'py'"),
    "no_language": ("```\nx\n```\n", "a block of ''"),
    "attribute": ("```python skip\nx\n```\n", "unknown attribute"),
    "indented": ("Text:\n\n    code\n", "an indented block"),
    "indented_by_a_tab": ("Text:\n\n\tcode\n", "an indented block"),
    "tildes": ("~~~python\n1 / 0\n~~~\n", "ZeroDivisionError"),
    "in_a_quote": ("> ```python\n> 1 / 0\n> ```\n", "ZeroDivisionError"),
    "in_a_list": ("- ```python\n  1 / 0\n  ```\n", "ZeroDivisionError"),
    "in_a_list_by_a_tab": ("1. Text:\n\n\t```python\n\t1 / 0\n\t```\n", "ZeroDivisionError"),
    "directive": ("```{code-block} python\n1 / 0\n```\n", "a directive"),
    "directive_that_tests": ("```{testcode}\n1 / 0\n```\n", "a directive"),
    "directive_within": ("```{eval-rst}\n.. code-block:: python\n\n   1 / 0\n```\n", "a directive with code"),
    "html": ("<pre><code>1 / 0</code></pre>\n", "code in HTML"),
    "html_in_a_line": ("Text <code>1 / 0</code>.\n", "code in HTML"),
    "html_before": ("<details>\n```python\n1 / 0\n```\n</details>\n", "code in HTML"),
    "anything": ("```python\nprint(2)\n```\n\n```text\n...\n```\n", "nothing but '...'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_document_fails(name, tmp_path):
    text, message = WRONG[name]
    with pytest.raises(DocumentError, match=re.escape(message)):
        Document("document.md", text, tmp_path).run()


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_document_is_not_passed_over(name):
    assert has_code(WRONG[name][0])


def test_a_right_document_runs(tmp_path):
    """One namespace, one folder, saved blocks, numbers told apart, a skipped block that is reported."""
    text = """
- In a list:

  ```python
  # tool.py
  print(MAJOR)  # never run here: MAJOR is not defined
  ```

```python
import sys
```

```python
print(sys.version_info.major, 0.123)
```

```text
3 ...
```

```sh
ls tool.py && make test && pip install '.[test]' && .venv/bin/python -c "import refops"
```

```text
tool.py
```

```sh needs=no_such_program
no_such_program
```

```python needs=no_such_module
import no_such_module
```
"""
    skipped = Document("document.md", text, tmp_path).run()
    assert [line.split(": ", 1)[1] for line in skipped] == [
        "sh not run: no no_such_program here",
        "python not run: no no_such_module here",
    ]


# --- links, commands and tables ---------------------------------------------------------------------------------------


def anchor(heading):
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def inline_tokens(text):
    for token in MarkdownIt().enable("table").parse(text):
        yield from token.children or []


def anchors(text):
    tokens = MarkdownIt().parse(text)
    inside = (tokens[i + 1] for i, token in enumerate(tokens) if token.type == "heading_open")
    return {anchor("".join(child.content for child in token.children)) for token in inside}


@pytest.mark.parametrize("path", DOCUMENTS)
def test_every_link_leads_somewhere(path):
    for token in inline_tokens(read(path)):
        target = unquote(token.attrGet("href") or token.attrGet("src") or "")
        if not target or target.startswith(("https://", "mailto:")):
            continue
        name, _, fragment = target.partition("#")
        file = (ROOT / path).parent / name if name else ROOT / path
        assert file.exists(), f"{path} links to {target}"
        if fragment and file.suffix == ".md":
            assert fragment in anchors(file.read_text()), f"{path} links to {target}"


@pytest.mark.parametrize("path", DOCUMENTS)
def test_commands_in_the_text_exist(path):
    """`make target` and `pip install '.[extra]'` in the text, as in the blocks."""
    for token in inline_tokens(read(path)):
        if token.type != "code_inline":
            continue
        if command := re.match(r"make ([a-z][\w-]*)", token.content):
            assert command[1] in make_targets(), f"{path}: {token.content}"
        if token.content.startswith("pip install") and (asked := re.search(r"'\.\[(.*?)\]'", token.content)):
            assert set(asked[1].split(",")) <= extras(), f"{path}: {token.content}"


#: Hyphenated names of other things in the guide.
PROGRAMS = ("nvidia-cuda-nvcc",)
FOLDERS = "tests|docs|examples|notebooks|refops|cuda_kernels|fuser"


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if not path.startswith("docs/spec/")])  # those name TE's
def test_files_named_in_the_text_exist(path):
    """`folder/file.py` in the text, from the repository's root; `folder/file.py::function` with the function."""
    for token in inline_tokens(read(path)):
        found = token.type == "code_inline" and re.fullmatch(rf"((?:{FOLDERS})/[\w/]+\.\w+)(?:::(\w+))?", token.content)
        if found and "NAME" not in found[1]:  # which the reader replaces
            assert (ROOT / found[1]).exists(), f"{path}: {token.content}"
            assert not found[2] or f"\ndef {found[2]}(" in read(found[1]), f"{path}: {token.content}"


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.startswith("docs/guide/")])
def test_conventions_named_in_the_guide_exist(path):
    """`kebab-case` in a guide page is the name of a convention of the oracle, or of a scaling of the command line."""
    for token in inline_tokens(read(path)):
        if token.type == "code_inline" and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", token.content):
            assert token.content in {*CONVENTIONS, *SCALINGS, *PROGRAMS}, f"{path}: {token.content}"


def test_table_of_activations_is_the_codes():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|$", read("docs/guide/activations.md"), re.MULTILINE))
    assert rows == {name: row.formula for name, row in ACTIVATIONS.items()}
