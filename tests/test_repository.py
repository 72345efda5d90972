"""The repository's promises about itself: configs are valid, documents name what exists."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from typing import get_args

import pytest
import yaml
from messages import says
from processes import ROOT, run_python

from declutr.cli.main import main, settings_page
from declutr.common.config import load_config
from declutr.common.config_docs import annotated_yaml
from declutr.pipeline.config import PipelineConfig
from declutr.trainer.config import TrainConfig
from declutr.trainer.objectives.base import implementation_of
from declutr.trainer.objectives.registry import DEFAULT

FOLDERS = "common|pipeline|trainer|evaluation|adaptation|reproduction|doctor|inspection|cli|benchmarks|configs|docs"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCUMENTS = [ROOT / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md", "llms.txt")]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_config_is_valid(path):
    sections, models = yaml.safe_load(path.read_text()), {"prepare": PipelineConfig, "train": TrainConfig}
    assert sections
    for section in sections:
        config = load_config(str(path), section, models[section])
        assert yaml.safe_load(annotated_yaml(config)) == config.model_dump(mode="json")


def test_settings_page_is_current_and_every_setting_has_a_meaning():
    page = (ROOT / "docs/reference/settings.md").read_text()
    assert page == settings_page(), "outdated: run `make settings`"
    rows = re.findall(r"^\| `(.+?)` \| .*? \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 100
    assert [name for name, meaning in rows if not meaning or meaning.startswith("One of ")] == []


@pytest.mark.parametrize("name", ["demo", "cpu-small", "adapt", "multilingual"])
def test_sections_fit_each_other(name):
    data = load_config(f"configs/{name}.yaml", "prepare", PipelineConfig)
    run = load_config(f"configs/{name}.yaml", "train", TrainConfig)
    assert run.data == data.output
    assert run.encoder.pretrained is None or run.encoder.pretrained == data.tokenizer.name
    assert run.objective.remark_before(run.main.context("drop")) is None
    assert (run.spans.max_tokens, run.spans.num_anchors) == (data.geometry.max_tokens, data.geometry.num_anchors)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_name_paths_that_exist(path):
    names = set(re.findall(rf"(?<![\w/])((?:{FOLDERS}|deploy|tests)/[\w./-]*\w)", path.read_text()))
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_documents_name_benchmarks_that_exist():
    """Commands that run, and the file of every published figure; no file of a figure that is published nowhere."""
    folder = ROOT / "benchmarks"
    text = "\n".join(path.read_text() for path in [*DOCUMENTS, ROOT / "CHANGELOG.md", folder / "README.md"])
    gone = re.compile(r"`python -m benchmarks[^`]*` \(at commit \w+\)")  # its numbers and their file stay
    commands = set(re.findall(r"python -m (benchmarks(?:\.\w+)*)", gone.sub("", text)))
    assert len(commands) >= 7
    for name in commands:
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), name
    files = set(re.findall(r"[\w-]+_(?:epyc|xeon|h100|h200)-[\w-]+\.json", text))
    assert files == {path.name for path in (folder / "results").iterdir()}


def test_documents_name_make_targets_that_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in DOCUMENTS:
        used = " ".join(re.findall(r"`make ([a-z -]+?)`", path.read_text())).split()
        assert {*used} <= targets, path


def test_check_finds_conflict_markers(tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    assert "markers" in re.search(r"^check: (.*?) ##", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()

    def markers():
        subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
        return subprocess.run(["make", "markers"], cwd=tmp_path, capture_output=True, text=True, check=False)

    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / "fine.md").write_text("Title\n=======\n    <<<<<< x\n")
    assert markers().returncode == 0
    lines = [f"{indent}{sign * 7} main" for indent in ("", "    ") for sign in "<>|"]
    (tmp_path / "mended.py").write_text("\n".join(["first", *lines]))
    result = markers()
    assert result.returncode != 0
    assert [line for number, line in enumerate(lines, 2) if f"mended.py:{number}:{line}" not in result.stdout] == []


def test_setup_says_what_it_does():
    command = ["make", "-nB", "--no-print-directory", "setup", "TRITON=triton"]  # prints its commands alone
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    lines = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"setup: (\d of 5|done)", lines) == [*(f"{step} of 5" for step in range(1, 6)), "done"]
    pinned = ["-c constraints.txt torch", "-c constraints.txt triton", "--require-hashes -r requirements.lock"]
    assert re.findall(r"--no-compile (.*)", lines) == [*pinned, "--no-deps --no-build-isolation -e ."]
    assert lines.splitlines()[-2] == "touch .venv/.installed"


def test_every_command_helps_and_has_the_options_that_documents_name(capsys):
    assert main([]) == 0
    helps = {}
    for command in re.findall(r"^  declutr ([a-z-]+)", capsys.readouterr().out, re.MULTILINE):
        with pytest.raises(SystemExit, match=r"^0$"):
            main([command, "--help"])
        helps[command] = capsys.readouterr().out
        assert helps[command].startswith(f"usage: declutr {command} ")
    commands = (ROOT / "docs/reference/commands.md").read_text()
    assert helps.keys() <= {*re.findall(r"`declutr ([a-z-]+)[^`]*`(?=.*\|)", commands)}, "the page of commands"
    uses = re.compile(r"\bdeclutr ([a-z][a-z-]*)((?: [^`\n#]*)?)")
    options = [
        (path.name, command, option)
        for path in DOCUMENTS
        for command, rest in uses.findall(path.read_text().replace("\\\n", " "))
        for option in re.findall(r"(?<!\S)--[a-z-]+", rest)
    ]
    assert len(options) > 20
    assert [place for place in options if not re.search(rf"{place[2]}\b", helps.get(place[1], ""))] == []


def test_help_waits_for_no_library():
    """Every `--help` answers within a second; torch, Ray, transformers, pyarrow and pandas take several."""
    code = """if True:
        import contextlib, io, sys
        from declutr.cli.main import _COMMANDS, main
        for command in _COMMANDS:
            with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
                main([command, "--help"])
            loaded = {"torch", "ray", "transformers", "pyarrow", "pandas", "matplotlib"} & set(sys.modules)
            assert not loaded, (command, loaded)
    """
    run_python("-c", code)


def test_choices_of_options_are_those_of_the_settings():
    from declutr.adaptation.config import AdaptConfig
    from declutr.cli import FORMATS, POOLINGS, PRECISIONS, ROLES, TARGETS
    from declutr.common.config import AnyPrecision
    from declutr.encoders.protocol import Pooling, Role
    from declutr.evaluation.export.inputs import Target
    from declutr.pipeline.readers.corpus import Choice

    assert get_args(Choice) == get_args(AdaptConfig.model_fields["format"].annotation) == FORMATS
    assert get_args(Pooling) == POOLINGS
    assert get_args(Role) == ROLES
    assert get_args(AnyPrecision) == PRECISIONS
    assert get_args(Target) == TARGETS


@pytest.mark.slow
def test_wheel_has_every_file_of_the_packages_and_runs_its_commands_outside_of_the_checkout(tmp_path):
    checkout, folder = tmp_path / "checkout", tmp_path / "site"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, tracked.split("\0")):
        if name.split("/")[0] not in ("tests", "benchmarks", "docs"):
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name, follow_symlinks=False)
    quiet = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--no-compile"]
    subprocess.run([sys.executable, "-m", "pip", "install", *quiet, "--target", folder, checkout], check=True)
    assert {path.name for path in folder.iterdir()} == {"bin", "declutr", f"declutr_ray-{PROJECT['version']}.dist-info"}

    def files(package):
        return {path.relative_to(package) for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}

    for package in (ROOT / "src" / "declutr").iterdir():
        if package.is_dir() and package.name != "__pycache__":
            assert files(folder / "declutr" / package.name) == files(package)
    code = f"import sys; sys.path.insert(0, {str(folder)!r}); "
    code += "import declutr.cli.main as m; print(m.__file__); m.main()"
    for arguments in (["--help"], ["train", "configs/cpu-small.yaml", "--print-config"]):
        assert run_python("-c", code, *arguments, folder=tmp_path).stdout.startswith(str(folder))


@pytest.mark.parametrize("package", ["pipeline", "trainer"])
def test_package_under_a_second_name_is_refused(package):
    says(run_python("-c", f"import {package}", check=False).stderr, "ImportError", f"declutr.{package}", package)


def named_in(path):
    """Identifiers and string constants of a Python file, docstrings and messages left out."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) | ast.Constant(value=str(name)):
                yield name
            case ast.arg(arg=name) | ast.keyword(arg=name):
                yield name


def test_the_trainer_names_no_objective():
    """A new objective changes no file outside trainer/objectives/: none of them knows one by class, kind or term."""
    config = type(DEFAULT)
    own = {config.__name__, implementation_of(DEFAULT).__name__, DEFAULT.kind, *config.metrics} - {"mlm"}
    own |= {"ntxent", "anchors", "positives", "queue_size"}
    files = [path for path in (ROOT / "trainer").rglob("*.py") if "objectives" not in path.parts]
    assert len(files) > 40
    assert {(path.name, name) for path in files for name in named_in(path) if name in own} == set()


def test_citation_and_licence_are_those_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert [citation[key] for key in ("version", "license")] == [PROJECT["version"], PROJECT["license"]]
    assert all(citation[key] for key in ("cff-version", "title", "message", "authors", "references"))
    assert all("Apache License" in (ROOT / name).read_text() for name in PROJECT["license-files"])


def test_workflows_call_the_checks_of_every_change_and_actions_by_commit():
    texts = {path.stem: path.read_text() for path in (ROOT / ".github/workflows").iterdir()}
    assert yaml.safe_load(texts["ci"])["jobs"]["ci"]["steps"][-1]["run"].endswith("bash .ci/run")
    used = re.findall(r"uses: (.*)", "".join(texts.values()))
    assert [action for action in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", action)] == []


def test_check_finds_names_that_say_nothing(tmp_path):
    (tmp_path / "x.py").write_text("def found(told):\n    for each in told:\n        told.made = each\n" * 13)
    done = run_python(ROOT / "tests/names.py", tmp_path / "x.py", check=False)
    assert done.returncode == 1
    assert done.stderr.count("x.py:") == 4 * 13
