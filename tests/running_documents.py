"""Runs the code blocks of a Markdown document from top to bottom, as a reader would who pastes them.

    python      in one namespace for the document, in a process of its own; prints what the next `text` block shows
    sh          in bash, errors and unset names being fatal; likewise
    cpp         compiled, warnings being errors: a whole program, or a fragment with its harness
    rust        compiled by rustc, warnings being errors
    cuda        compiled by nvcc to PTX
    text        output, a picture, a formula: compared where it follows python or sh, else only shown. "..." in it
                stands for anything: numbers that differ from machine to machine

All run in one folder that looks like a clone: links to what the repository has, and what earlier blocks wrote. A block
whose first line is a comment with nothing but a file name is saved there under that name; a later block must use it,
and Python is then run by that block alone. `needs=NAME` after the language names a program or module without which the
block is skipped, and the test says so. The environment is clean but for PATH (this interpreter's folder first), HOME
and caches. In sh, `make` only looks up the targets (--dry-run) and `pip` only the extras: what they install is CI's
first step.
"""

import doctest
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parent.parent
#: What may stand after ```: these, and MyST's directives that hold no code, which Sphinx builds. Files that a page
#: includes have tests of their own.
LANGUAGES = ("python", "sh", "cpp", "rust", "cuda", "text")
DIRECTIVES = ("{eval-rst}", "{toctree}", "{literalinclude}")
#: Code that would be shown and not run: in HTML, and in reStructuredText.
HTML_CODE = re.compile(r"<(?:pre|code|samp|textarea|xmp)\b|```|~~~", re.IGNORECASE)
RST_CODE = re.compile(
    r"\.\. (?:code|code-block|sourcecode|testcode|doctest|parsed-literal|raw)::|^(?!\.\. ).*::$|>>> ", re.MULTILINE
)
KEPT_VARIABLES = ("HOME", "LANG", "TMPDIR", "NUMBA_CACHE_DIR", "LD_LIBRARY_PATH", "RUSTUP_HOME", "CARGO_HOME")
TIMEOUT = 300

#: Fragments of documents -> a program around them: (document, start of the fragment): (before, after).
HARNESSES = {
    ("refops/oracle/README.md", "std::vector<char> host(bytes);"): (
        "#include <cstddef>\n#include <cstring>\n#include <fstream>\n#include <vector>\n"
        "enum Kind { cudaMemcpyDeviceToHost };\n"
        "static void cudaMemcpy(void* to, const void* from, std::size_t n, Kind) { std::memcpy(to, from, n); }\n"
        "void dump(const void* device_codes, std::size_t bytes) {\n",
        "}\n",
    ),
}

#: The process that runs a document's python blocks: a JSON line in and out for each.
CHILD = """
import contextlib, io, json, os, sys, traceback
answers, names = os.fdopen(os.dup(1), "w"), {"__name__": "__main__"}
os.dup2(2, 1)  # what a library writes by itself is no answer
for line in sys.stdin:
    path, number, code = json.loads(line)
    printed, error = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile("\\n" * number + code, path, "exec"), names)
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps([printed.getvalue(), error]), file=answers, flush=True)
"""

#: `pip` in sh blocks: every extra that is asked for is one that setup.cfg has.
PIP = """
import re, sys
from configparser import ConfigParser
config = ConfigParser(interpolation=None)
config.read({setup!r})
known = set(config["options.extras_require"])
for word in sys.argv[1:]:
    for extras in re.findall(r"\\[(.*?)\\]", word):
        missing = set(extras.split(",")) - known
        if missing and word.startswith("."):
            sys.exit(f"no extra {{sorted(missing)}} in setup.cfg: {{word}}")
"""


@dataclass
class Block:
    """A fenced block.

    Attributes:
        language, attributes: what stands after ```, "python" and {"needs": "triton"}.
        text, line: its text, and the number of the line before it.
        output: the text of the `text` block that follows at once, or None.
    """

    language: str
    attributes: dict
    text: str
    line: int
    output: str | None = None

    @property
    def file_name(self):
        """The name under which the block is saved, or None."""
        found = re.match(r"(?:#|//) ([\w.-]+\.\w+)\n", self.text)
        return found and found[1]


class DocumentError(AssertionError):
    """A block that does not do what the document says."""


def documents():
    """Paths of the Markdown files of the repository, relative to it."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0:
        return sorted(path for path in listed.stdout.splitlines() if (ROOT / path).exists())
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(str(path) for path in found if path.parts[0] not in (".venv", "build") and "." not in path.parts[0])


def blocks_of(text):
    """The code blocks of a Markdown text; DocumentError for one that nothing would run."""
    blocks, before = [], None
    for token in MarkdownIt().parse(text):
        before, last = token, before
        line = token.map[0] + 1 if token.map else 0
        if token.type == "code_block":
            raise DocumentError(f"line {line}: an indented block; fence it and say what it is")
        html = [part.content for part in (token, *(token.children or ())) if part.type in ("html_block", "html_inline")]
        if any(map(HTML_CODE.search, html)):
            raise DocumentError(f"line {line}: code in HTML; fence it, with an empty line before")
        if token.type != "fence":
            continue
        if token.info.startswith("{"):
            if token.info.split()[0] not in DIRECTIVES or RST_CODE.search(token.content):
                raise DocumentError(f"line {line}: a directive with code, or not one of {', '.join(DIRECTIVES)}")
            before = None  # what follows is no output
            continue
        language, *attributes = token.info.split() or [""]
        if language not in LANGUAGES:
            raise DocumentError(f"line {line}: a block of {token.info!r}; known are {', '.join(LANGUAGES)}")
        attributes = dict(attribute.partition("=")[::2] for attribute in attributes)
        if set(attributes) - {"needs"}:
            raise DocumentError(f"line {line}: unknown attribute in {token.info!r}; known is needs=NAME")
        if language == "text" and last is not None and last.type == "fence" and blocks:
            if not token.content.replace("...", "").strip():
                raise DocumentError(f"line {line}: an output of nothing but '...', which any output would match")
            blocks[-1].output = token.content
        blocks.append(Block(language, attributes, token.content, line))
    return blocks


def nvcc():
    """The CUDA compiler: on PATH, or the wheel's; None without one."""
    wheel = Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin", "nvcc")
    return shutil.which("nvcc") or (str(wheel) if wheel.exists() else None)


class Document:
    """One run of a document in `folder`; `run()` returns the blocks that were skipped, each with the reason."""

    def __init__(self, path, text, folder):
        self.path, self.blocks, self.folder = path, blocks_of(text), Path(folder)
        self.child = None
        self.skipped = []

    def run(self):
        self.prepare_folder()
        try:
            for block in self.blocks:
                self.run_block(block)
        finally:
            if self.child:
                self.child.stdin.close()
                self.child.wait(60)
                self.child.stdout.close()
        return self.skipped

    def prepare_folder(self):
        """Links to the repository's files, and a folder of programs that stand for pip, python and make."""
        tools = self.folder / ".venv" / "bin"
        tools.mkdir(parents=True)
        for path in Path(sysconfig.get_path("scripts")).iterdir():
            if not path.name.startswith(("pip", "python")):
                (tools / path.name).symlink_to(path)
        for name in ("python", "python3"):  # a link would look for its environment beside itself
            self.write_tool(tools / name, f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        make = shutil.which("make")
        self.write_tool(tools / "pip", f"#!{sys.executable}\n" + PIP.format(setup=str(ROOT / "setup.cfg")))
        if make:
            self.write_tool(
                tools / "make",
                f'#!/bin/sh\nexec {make} --dry-run --no-print-directory -C {shlex.quote(str(ROOT))} "$@" >/dev/null\n',
            )
        for path in ROOT.iterdir():
            if path.name not in (".venv", "build", ".git"):
                (self.folder / path.name).symlink_to(path)
        self.environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        self.environment |= {
            "PATH": os.pathsep.join([str(tools), os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": os.pathsep.join(p for p in [str(ROOT), os.environ.get("PYTHONPATH"), str(self.folder)] if p),
            "PYTHONSAFEPATH": "1",  # the packages of ROOT, not the links to them: machine code is kept by path
            "OMP_NUM_THREADS": "1",  # torch's and Numba's threads would wait for each other on a busy machine
            "COLUMNS": "120",
            "TERM": "dumb",
        }

    @staticmethod
    def write_tool(path, text):
        path.unlink(missing_ok=True)  # a link to the tool that it stands for
        path.write_text(text)
        path.chmod(0o755)

    def run_block(self, block):
        needed = self.missing(block)
        if block.language != "text" and block.file_name:
            self.save(block)
        if block.language == "python" and (needed or block.file_name):
            compile(block.text, self.path, "exec")
            if not needed:
                return
        if needed:
            self.skipped.append(f"{self.path}:{block.line}: {block.language} not run: no {needed} here")
            return
        printed = getattr(self, f"run_{block.language}")(block)
        if block.language == "python" or (block.language == "sh" and block.output is not None):
            self.compare(block, block.output or "", printed)

    def save(self, block):
        """Write a block to the file that it names; some later block must use the file."""
        (self.folder / block.file_name).write_text(block.text)
        used = rf"\b{re.escape(block.file_name)}|(from|import) {re.escape(Path(block.file_name).stem)}\b"
        later = self.blocks[self.blocks.index(block) + 1 :]
        if not any(re.search(used, other.text) for other in later if other.language != "text"):
            self.fail(block, f"saved as {block.file_name}, and no later block uses it")

    def missing(self, block):
        """The name of what the block needs and is not here, or None."""
        tools = {"cpp": "c++", "rust": "rustc"}
        names = [name for name in block.attributes.get("needs", "").split(",") if name]
        names += [tools[block.language]] if block.language in tools else []
        for name in names:
            if not shutil.which(name) and importlib.util.find_spec(name) is None:
                return name
        return "nvcc" if block.language == "cuda" and nvcc() is None else None

    def fail(self, block, what):
        raise DocumentError(f"{self.path}:{block.line}: {what}")

    def compare(self, block, expected, printed):
        expected, printed = expected.rstrip("\n"), printed.rstrip("\n")
        if not doctest.OutputChecker().check_output(expected, printed, doctest.ELLIPSIS):
            self.fail(block, f"printed\n{printed}\nwhere the document has\n{expected}")

    def run_python(self, block):
        if self.child is None:
            self.child = subprocess.Popen(
                [sys.executable, "-c", CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=self.folder,
                env=self.environment,
            )
        self.child.stdin.write(json.dumps([self.path, block.line, block.text]) + "\n")
        self.child.stdin.flush()
        alarm = threading.Timer(TIMEOUT, self.child.kill)
        alarm.start()
        answer = self.child.stdout.readline()
        alarm.cancel()
        if not answer:
            self.fail(block, f"the interpreter ended, or took more than {TIMEOUT} s")
        printed, error = json.loads(answer)
        if error:
            self.fail(block, f"{error}\nprinted before: {printed!r}")
        return printed

    def call(self, block, words, **options):
        done = subprocess.run(
            [str(word) for word in words],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self.environment,
            timeout=TIMEOUT,
            **options,
        )
        if done.returncode:
            self.fail(block, f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def run_sh(self, block):
        return self.call(block, ["bash", "-euo", "pipefail", "-c", block.text])

    def run_cpp(self, block):
        before, after = "", ""
        if "int main" not in block.text:
            keys = [key for key in HARNESSES if key[0] == self.path and block.text.startswith(key[1])]
            if not keys:
                self.fail(block, "a fragment of C++ without a harness in tests/running_documents.py")
            before, after = HARNESSES[keys[0]]
        flags = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-x", "c++", "-", "-o", os.devnull)
        self.call(block, ["c++", *(("-c",) if before else ()), *flags], input=before + block.text + after)

    def run_rust(self, block):
        flags = ("--edition", "2021", "-D", "warnings", "--crate-name", "block", "--emit", "metadata=block.rmeta", "-")
        self.call(block, ["rustc", *flags], input=block.text)

    def run_cuda(self, block):
        source = self.folder / "block.cu"
        source.write_text(block.text)
        self.call(block, [nvcc(), "--ptx", "-arch=sm_90", "-Werror", "all-warnings", source, "-o", os.devnull])

    def run_text(self, block):
        """Shown only, or compared by the block before."""


def make_targets():
    """Targets of the Makefile that its help describes."""
    return set(re.findall(r"^## (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def extras():
    """Names of the extras in setup.cfg."""
    config = ConfigParser(interpolation=None)
    config.read(ROOT / "setup.cfg")
    return set(config["options.extras_require"])
