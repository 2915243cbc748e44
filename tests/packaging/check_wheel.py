"""The package as a user gets it: build wheel and sdist, look inside, install on a clean machine, use it there.

    python tests/packaging/check_wheel.py [--full]

The wheel is built from the sdist. Each is installed into a new environment outside of the clone, with the constraints
that the tests run with: the wheel for this interpreter and for the oldest and the newest other of 3.10 to 3.13 that is
found (PYTHONS: paths separated by ":"; else PATH and pyenv's folder), the sdist for this one. `--full` takes every
other, also resolves every extra on each interpreter, with the packages that its index has, and runs the tests of the
reference, the oracle and the host kernels on each of the others. Needs the network. Exit code 1 with the first thing
that is wrong.
"""

import argparse
import contextlib
import glob
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from email import message_from_string
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
HERE = Path(__file__).resolve().parent
PACKAGES = ("refops", "cuda_kernels", "fuser")
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
TESTS = ("tests/refops", "tests/oracle", "tests/cuda_kernels/test_host.py", "tests/cuda_kernels/test_host_calls.py")


class PackageError(Exception):
    """What is wrong with the package."""


def require(condition, message):
    """Raise PackageError unless a condition holds."""
    if not condition:
        raise PackageError(message)


def say(what, start=None):
    """Print a line, with the seconds since `start`."""
    print(what + (f" ({time.perf_counter() - start:.1f} s)" if start else ""), flush=True)


def run(*command, cwd, code=0):
    """What a command prints, errors included where it must end with one, without this process's Python settings."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "NUMBA_ENABLE_CUDASIM")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    shown = " ".join(map(str, command))
    require(done.returncode == code, f"`{shown}` ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout + (done.stderr if code else "")


# --- what is in it ----------------------------------------------------------------------------------


def source_files():
    """Files of the packages in the clone, which must all be shipped."""
    files = {path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()}
    return {str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts}


def check_contents(wheel, sdist):
    """Every file of the packages, the licence, and nothing else."""
    expected = source_files()
    for package in PACKAGES:
        require(f"{package}/py.typed" in expected, f"{package} has no py.typed")
    shipped = set(zipfile.ZipFile(wheel).namelist())
    (info,) = {name.split("/")[0] for name in shipped if ".dist-info/" in name}
    metadata = {name for name in shipped if name.startswith(f"{info}/")}
    require(f"{info}/licenses/LICENSE" in metadata, "the wheel has no LICENSE")
    require(shipped - metadata == expected, f"the wheel differs from the clone: {(shipped - metadata) ^ expected}")
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    wanted = expected | {"LICENSE", "README.md", "setup.cfg", "pyproject.toml"}
    require(wanted <= packed, f"the sdist lacks {wanted - packed}")
    more = {name for name in packed - wanted if not name.startswith("refops.egg-info/")}
    require(more <= {"PKG-INFO", "MANIFEST.in"}, f"the sdist has more: {more}")


def metadata_of(wheel):
    """The metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_string(archive.read(name).decode())


def check_metadata(wheel):
    """Name, version, interpreters, extras; the long description renders."""
    from readme_renderer import markdown

    import refops

    metadata = metadata_of(wheel)
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        tops = archive.read(f"{info}/top_level.txt").decode().split()
        entries = archive.read(f"{info}/entry_points.txt").decode()
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    require(metadata["Name"] == "refops" and metadata["Version"] == refops.__version__, "name or version is wrong")
    require(metadata["Requires-Python"] == ">=3.10", f"Requires-Python is {metadata['Requires-Python']}")
    extras = set(metadata.get_all("Provides-Extra"))
    require(extras == set(settings["options.extras_require"]), f"extras are {extras}")
    named = {c.split(" :: ")[-1] for c in metadata.get_all("Classifier") if re.search(r"Python :: 3\.\d", c)}
    require(named == set(VERSIONS), f"classifiers name Python {sorted(named)}")
    require(sorted(tops) == sorted(PACKAGES), f"installs {tops}")
    require("refops = refops.cli:main" in entries, "the command refops is missing")
    problems = io.StringIO()
    with contextlib.redirect_stderr(problems):
        rendered = markdown.render(metadata.get_payload(), stream=problems)
    require(rendered is not None, f"the long description does not render: {problems.getvalue()}")


# --- where it is installed --------------------------------------------------------------------------


def other_interpreters():
    """Version -> path of the interpreters besides this one's version."""
    if "PYTHONS" in os.environ:
        candidates = os.environ["PYTHONS"].split(":")
    else:
        candidates = [shutil.which(f"python{version}") for version in VERSIONS]
        candidates += sorted(glob.glob(os.path.expanduser("~/.pyenv/versions/3.*/bin/python")))
    found = {}
    for path in filter(None, candidates):
        code = "import ensurepip, sys, venv; print(*sys.version_info[:2], sep='.')"
        answer = subprocess.run([path, "-c", code], capture_output=True, text=True)
        version = answer.stdout.strip()
        if answer.returncode == 0 and version in VERSIONS and version != "{}.{}".format(*sys.version_info):
            found.setdefault(version, path)
    return found


class Machine:
    """A new environment with a distribution in it, in a folder of its own."""

    def __init__(self, interpreter, folder, distribution):
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        run(interpreter, "-m", "venv", folder / "env", cwd=folder)
        self.python = folder / "env" / "bin" / "python"
        self.install(distribution)
        self.name = self("--version").strip()

    def install(self, what, *options):
        """Install a distribution, its extra or a package."""
        pip = (self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*pip, "--constraint", ROOT / "constraints.txt", *options, what, cwd=self.folder)

    def __call__(self, *arguments, code=0):
        """Output of this machine's Python in a folder that is not the clone."""
        return run(self.python, *arguments, cwd=self.work, code=code)

    def command(self, *arguments, code=0, cwd=None):
        """Output of the command refops."""
        return run(self.python.with_name("refops"), *arguments, cwd=cwd or self.work, code=code)

    def installed_files(self):
        """Path -> time of last change of everything that is installed."""
        (site,) = (self.folder / "env" / "lib").glob("python3.*/site-packages")
        return {str(path.relative_to(site)): path.stat().st_mtime_ns for path in site.rglob("*") if path.is_file()}


def readme_examples():
    """(code, output) of the README's Python blocks, in order."""
    return re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def check_examples(machine, count):
    """The first `count` examples of the README, as pasted into a shell, print what it says."""
    examples = readme_examples()[:count]
    require(len(examples) == count, f"the README has {len(examples)} examples")
    printed = machine("-c", "\n".join(code for code, _ in examples))
    require(printed == "".join(output for _, output in examples), f"the README's examples print\n{printed}")


def check_use(machine):
    """The reference and its command line; what is missing for the rest is said in one sentence."""
    where = machine("-c", "import refops, cuda_kernels, fuser; print(*refops.__path__)").strip()
    require(where.startswith(str(machine.folder)), f"refops is imported from {where}")
    check_examples(machine, 1)
    version = machine("-c", "import refops; print(refops.__version__)")
    require(machine.command("--version") == machine("-m", "refops", "--version") == f"refops {version}", "--version")
    require("0.75" in machine.command("formats", "e2m3"), "refops formats e2m3 shows no 0.75")
    explained = machine.command("explain", "--scaling", "nvfp4-1x16", "--values", "3,-2,1.5,0.05")
    require("0x" in explained, "refops explain shows no code")
    machine("-c", "import numpy as np; np.save('x.npy', np.arange(4096, dtype=np.float32).reshape(32, 128))")
    machine(
        "-c",
        "import numpy as np, refops; q = refops.activation_quantize('swiglu', np.load('x.npy'),"
        " refops.MXFP8Scaling(refops.E4M3)); q.rowwise_data.tofile('q.bin'); q.rowwise_scale_inv.tofile('s.bin')",
    )
    require("SQNR" in machine.command("inspect", "x.npy"), "refops inspect shows no SQNR")
    judge = ("check", "--op", "swiglu", "--scaling", "mxfp8", "--input", "x.npy", "--data", "q.bin", "--scale", "s.bin")
    require("RIGHT" in machine.command(*judge), "refops check")
    machine("-c", "open('q.bin', 'r+b').write(b'\\x7f')")
    require("WRONG" in machine.command(*judge, code=1), "refops check of a wrong dump")
    machine.command("golden", "--op", "swiglu", "--scaling", "mxfp8", "--shape", "64x256", "--out", "golden")
    require((machine.work / "golden" / "manifest.json").exists(), "refops golden wrote no manifest")
    check_report(machine)
    for code, hint in (
        ("import cuda_kernels; cuda_kernels.host", "pip install '.[host]'"),
        ("import cuda_kernels; cuda_kernels.amax([1.0])", "pip install '.[host]'"),
        ("import fuser; fuser.autocast", "pip install '.[fuser]'"),
        ("import fuser; fuser.xla", "pip install jax"),
    ):
        printed = machine("-c", code, code=1)
        require(hint in printed.splitlines()[-1], f"`{code}` says\n{printed}")
    for command in ("report", "puzzles"):
        printed = machine("-m", "cuda_kernels", command, code=2)
        require("pip install" in printed and "Traceback" not in printed, f"python -m cuda_kernels {command}: {printed}")


#: Golden vectors, real tensors, and what needs neither.
REPORT = ("report", "--section", "vectors", "--section", "survey", "--section", "helpers")


def check_report(machine):
    """`refops report` passes with the arrays of the clone."""
    verdict = machine.command(*REPORT, cwd=ROOT).splitlines()[-1]
    require(verdict.startswith("PASS: "), f"refops report in {ROOT} ends with {verdict!r}")


def check_where_reports_look(machine):
    """`refops report` finds the arrays of the clone in whose folder it is called, and says where it has none."""
    verdict = machine.command(*REPORT, cwd=ROOT / "docs").splitlines()[-1]
    require(verdict.startswith("PASS: "), f"refops report in {ROOT / 'docs'} ends with {verdict!r}")
    verdict = machine.command(*REPORT).splitlines()[-1]
    missing = "real tensors, golden vectors"
    require(verdict.startswith("INCOMPLETE: ") and missing in verdict, f"outside of a clone it ends with {verdict!r}")


def check_types(machine):
    """mypy --strict finds the types that a user is promised, and each misuse, in the installed package."""
    for name in ("typed_usage.py", "typed_misuse.py"):
        shutil.copy(HERE / name, machine.work)
    (machine.work / "mypy.ini").write_text("[mypy]\n")
    mypy = (sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--python-executable", machine.python)
    run(*mypy, "typed_usage.py", cwd=machine.work)
    found = run(*mypy, "typed_misuse.py", cwd=machine.work, code=1)
    objections = re.findall(r"^typed_misuse.py:(\d+): error: .*\[([\w-]+)\]$", found, re.MULTILINE)
    objections = {(int(line), code) for line, code in objections}
    lines = (HERE / "typed_misuse.py").read_text().splitlines()
    marked = {(n, line.partition("# error: ")[2]) for n, line in enumerate(lines, 1) if "# error: " in line}
    require(marked == objections, f"misuse: expected and not found {marked - objections}, found {objections - marked}")


def check_interpreter(interpreter, folder, wheel):
    """Everything that needs no further package; returns the `Machine`."""
    start = time.perf_counter()
    machine = Machine(interpreter, folder, wheel)
    before = machine.installed_files()
    check_use(machine)
    require(machine.installed_files() == before, "using the package wrote into site-packages")
    say(f"{machine.name}: the reference and its command line", start)
    return machine


def main():
    """Run every check; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="every interpreter; also every extra and the tests")
    full = parser.parse_args().full
    sys.path.insert(0, str(ROOT))
    try:
        with tempfile.TemporaryDirectory(prefix="refops-package-") as folder:
            check(Path(folder), full)
    except PackageError as error:
        print(f"WRONG: {error}", file=sys.stderr)
        return 1
    return 0


def check(folder, full):
    """The checks, in a folder that is removed afterwards."""
    start = time.perf_counter()
    run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
    (wheel,), (sdist,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    check_contents(wheel, sdist)
    check_metadata(wheel)
    say(f"{wheel.name}, {sdist.name}: every file of the packages, metadata", start)

    others = sorted(other_interpreters().items(), key=lambda found: VERSIONS.index(found[0]))
    others = others if full else others[:1] + others[1:][-1:]
    jobs = [(check_default, (folder / "default", wheel, sdist, full))]
    jobs += [(check_other, (path, folder / version, wheel, full)) for version, path in others]
    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        for outcome in [pool.submit(work, *arguments) for work, arguments in jobs]:
            outcome.result()
    if not others:
        say("no other interpreter of 3.10 to 3.13 found")


def check_default(folder, wheel, sdist, full):
    """This interpreter: also folders that a report is called in, types, the CPU kernels and the sdist."""
    machine = check_interpreter(sys.executable, folder, wheel)
    check_where_reports_look(machine)
    start = time.perf_counter()
    check_types(machine)
    say(f"{machine.name}: the types of a user's file, and objections to its misuses", start)
    start = time.perf_counter()
    machine.install(f"{wheel}[host]")
    before = machine.installed_files()
    check_examples(machine, 2)
    require(machine.installed_files() == before, "compiled functions were kept in site-packages")
    say(f"{machine.name}: with [host] the README's examples on the CPU kernels", start)
    start = time.perf_counter()
    files = own_files(machine)
    machine.install(sdist, "--force-reinstall", "--no-deps")
    differing = files ^ own_files(machine)
    require(not differing, f"wheel and sdist do not install the same: {differing}")
    check_examples(machine, 1)
    say(f"{machine.name}: the sdist installs the same", start)
    if full:
        check_extras(machine, wheel)


def check_extras(machine, wheel):
    """Each extra can be installed with the constraints; nothing is. `make` upgrades pip first, so this does."""
    start = time.perf_counter()
    machine.install("pip", "--upgrade")
    extras = metadata_of(wheel).get_all("Provides-Extra")
    for extra in extras:
        machine.install(f"{wheel}[{extra}]", "--dry-run")
    say(f"{machine.name}: every extra resolves: {', '.join(extras)}", start)


def own_files(machine):
    """Files of the packages that are installed."""
    return {n for n in machine.installed_files() if n.split("/")[0] in PACKAGES and "__pycache__" not in n}


def check_other(interpreter, folder, wheel, full):
    """Another interpreter; `full`: with every extra and the tests."""
    machine = check_interpreter(interpreter, folder, wheel)
    if full:
        check_extras(machine, wheel)
        run_tests(machine, wheel)


def run_tests(machine, wheel):
    """The tests of the reference, the oracle and the host kernels, of the clone, with this machine's packages."""
    start = time.perf_counter()
    machine.install(f"{wheel}[host,plot]")
    for package in ("hypothesis", "mpmath", "psutil", "pytest", "pytest-benchmark", "pytest-xdist"):
        machine.install(package)
    printed = run(machine.python, "-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider", *TESTS, cwd=ROOT)
    say(f"{machine.name}: {printed.strip().splitlines()[-1]}", start)


if __name__ == "__main__":
    sys.exit(main())
