"""Files from outside that carry code: on every way that a file is read, none of it runs, and nothing is unpickled."""

import ast
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from testing.small import make_rows

import lengthwise
from lengthwise.config import RunConfig
from run.small_runs import Command, write_run
from security.watched import MARK, watch
from tiers import some

MODULE = f"{MARK}_module"
CODES = ("tokenizer.py", "modeling.py", "configuration.py", f"{MODULE}.py", "custom_generate/generate.py", "setup.py")


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, canary):
        self._canary = str(canary)

    def __reduce__(self):
        return exec, (f"open({self._canary!r}, 'w').write('{MARK}')",)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that is whole: model, data, checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    path = write_run(folder, make_rows([9, 12, 5]), checkpoint={"every_steps": 2, "background": False}, steps=4)
    lengthwise.train(path)
    return folder


@pytest.fixture
def folder(run, tmp_path):
    """A copy of it, beside code that would tell of itself."""
    for name in ("model", "out"):
        shutil.copytree(run / name, tmp_path / name)
    for name in ("train.jsonl", "run.yaml"):
        shutil.copy(run / name, tmp_path / name)
    values = json.loads((tmp_path / "run.yaml").read_text())
    (tmp_path / "run.yaml").write_text(json.dumps({**values, "model": "model"}))
    for name in CODES:
        for where in (tmp_path / "model", tmp_path):
            (where / name).parent.mkdir(exist_ok=True)
            (where / name).write_text(source(tmp_path))
    return tmp_path


def canary(folder):
    return folder / "canary"


def source(folder):
    return f"open({str(canary(folder))!r}, 'w').write('{MARK}')\n"


def pickled(folder):
    return pickle.dumps(Payload(canary(folder)))


def change(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


AUTO_MAP = {name: f"{MODULE}.{name}" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoProcessor")}
TOKENIZER = {"tokenizer_class": f"{MODULE}.Tokenizer", "auto_map": {"AutoTokenizer": [f"{MODULE}.T", f"{MODULE}.F"]}}


def config_with_code(folder):
    keys = {"auto_map": AUTO_MAP, "architectures": [f"{MODULE}.Model"], "custom_pipelines": {"x": {"impl": MODULE}}}
    change(folder / "model/config.json", **keys, _attn_implementation=f"{MODULE}/kernel", trust_remote_code=True)


def weights_as_pickle(folder):
    (folder / "model/model.safetensors").unlink()
    (folder / "model/pytorch_model.bin").write_bytes(pickled(folder))


def index_to_pickle(folder):
    weights_as_pickle(folder)
    names = {"lm_head.weight": "pytorch_model.bin", "model.norm.weight": "../pickle"}
    (folder / "pickle").write_bytes(pickled(folder))
    (folder / "model/model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def header_with_code(folder):
    path = folder / "model/model.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt", "__reduce__": source(folder), MODULE: "x"})


def adapter(folder, into=None):
    into = into or folder / "adapter"
    into.mkdir(exist_ok=True)
    mapping = {"base_model_class": "Model", "parent_library": MODULE}
    keys = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "auto_mapping": mapping}
    (into / "adapter_config.json").write_text(json.dumps({**keys, "base_model_name_or_path": f"{MARK}/base"}))
    (into / "adapter_model.bin").write_bytes(pickled(folder))
    change(folder / "run.yaml", lora={"adapter": "adapter"})


def adapter_as_pickle(folder):
    adapter(folder)
    (folder / "adapter/adapter_model.safetensors").write_bytes(pickled(folder))


def tokenizer_with_code(folder):
    (folder / "model/tokenizer_config.json").write_text(json.dumps(TOKENIZER))
    (folder / "model/tokenizer.json").write_bytes(pickled(folder))
    (folder / "model/tokenizer.model").write_bytes(pickled(folder))
    (folder / "train.jsonl").write_text('{"text": "a"}\n')
    change(folder / "run.yaml", tokenizer="model")


def chat_template_with_code(folder):
    template = f"{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}{{% set x = '{MARK}' %}}"
    (folder / "model/chat_template.jinja").write_text(template)
    tokenizer_with_code(folder)


def run_file_with_tags(folder):
    payload = f'!!python/object/apply:exec ["{source(folder).strip()}"]'
    (folder / "run.yaml").write_text(f"model: {payload}\nsteps: !!python/name:os.system\ndata: *{MODULE}\n")


def measurements(folder):
    values = {"schema": "lengthwise.measurements/1", "py/object": f"{MODULE}.X", "date": source(folder)}
    (folder / "measured.json").write_text(json.dumps(values))
    change(folder / "run.yaml", measurements="measured.json")


def data_with_code(folder):
    """Python files as texts, a row that looks like an object, and a hidden cache beside them."""
    (folder / "texts").mkdir()
    (folder / "texts/a.py").write_text(source(folder))
    (folder / "texts/b.py").write_bytes(b"# -*- coding: unicode_escape -*-\n" + source(folder).encode())
    (folder / "rows.jsonl").write_text(json.dumps({"text": source(folder), "py/object": MODULE}) + "\n")
    (folder / "texts/.cache.pkl").write_bytes(pickled(folder))
    data = [{"path": "texts"}, {"path": "rows.jsonl"}]
    change(folder / "run.yaml", model="tiny", data=data, capacity_tokens="1K")


def checkpoint_with_pickles(folder):
    for checkpoint in (folder / "out/checkpoints").iterdir():
        (checkpoint / ".metadata").write_bytes(pickled(folder))
        (checkpoint / "rank-00000.safetensors").write_bytes(pickled(folder))


def checkpoint_of_text(folder):
    for checkpoint in (folder / "out/checkpoints").iterdir():
        change(checkpoint / "manifest.json", version=source(folder), run={"model": f"__import__('{MODULE}')"})


TRAIN, RESUME = ("train", "run.yaml", "--overwrite"), ("train", "run.yaml", "--resume", "--set", "steps=4")
VERIFY = ("verify", "run.yaml", "--ranks", "1", "--plan", "plan.json")


OF_ANOTHER_TYPE, PLAN = (
    {"model_type": MODULE, "auto_map": AUTO_MAP},
    {"schema": "lengthwise.plan/1", "py/object": MODULE},
)
TEXT = {"planner": f"__import__('{MODULE}')", "seed": f"${{{MODULE}}}", "tokenizer": f"{MODULE}:x"}
CASES = {
    "config with code": (config_with_code, TRAIN, 0),
    "header with code": (header_with_code, TRAIN, 0),
    "data with code": (data_with_code, TRAIN, 0),
    "another type": (lambda folder: change(folder / "model/config.json", **OF_ANOTHER_TYPE), TRAIN, 2),
    "weights as pickle": (weights_as_pickle, TRAIN, 2),
    "pickle": (lambda folder: (folder / "model/model.safetensors").write_bytes(pickled(folder)), TRAIN, 2),
    "index to pickle": (index_to_pickle, TRAIN, 2),
    "adapter beside model": (lambda folder: adapter(folder, folder / "model"), TRAIN, 2),
    "adapter as pickle": (adapter_as_pickle, TRAIN, 2),
    "tokenizer with code": (tokenizer_with_code, TRAIN, 2),
    "chat template with code": (chat_template_with_code, TRAIN, 2),
    "run file with tags": (run_file_with_tags, TRAIN, 2),
    "run file with text": (lambda folder: change(folder / "run.yaml", **TEXT), TRAIN, 2),
    "measurements": (measurements, TRAIN, 2),
    "data as pickle": (lambda folder: (folder / "train.jsonl").write_bytes(pickled(folder)), TRAIN, 2),
    "checkpoint with pickles": (checkpoint_with_pickles, RESUME, 2),
    "checkpoint of text": (checkpoint_of_text, RESUME, 2),
    "plan": (lambda folder: (folder / "plan.json").write_text(json.dumps(PLAN)), VERIFY, 2),
    "plan as pickle": (lambda folder: (folder / "plan.json").write_bytes(pickled(folder)), VERIFY, 2),
}


@pytest.mark.parametrize("hostile", some(CASES, 0, 4, 9, 14))
def test_no_file_from_outside_runs_code(folder, hostile):
    spoil, arguments, expected = CASES[hostile]
    spoil(folder)
    report = os.memfd_create("events")

    def prepare():
        os.chdir(folder)
        watch(report)

    status, out, err = Command(*arguments, prepare=prepare).finish()
    events = os.pread(report, 1 << 20, 0).decode()
    os.close(report)
    assert events == ""
    assert not canary(folder).exists()
    assert status == expected, err
    assert "Traceback" not in out + err
    assert err.count("error[") >= (expected > 0)


@pytest.mark.parametrize(
    ("act", "event"),
    [
        (lambda folder: pickle.loads(pickled(folder)), "pickle.find_class"),
        (lambda folder: exec(source(folder)), "compile"),
        (lambda folder: __import__(MODULE), "import"),
        (lambda folder: os.system(f"echo {MARK} >/dev/null"), "os.system"),
        (lambda folder: __import__("socket").getaddrinfo("192.0.2.1", 80), "socket.getaddrinfo"),
        (lambda folder: __import__("torch").load("/nowhere"), "torch.load"),
    ],
)
def test_the_watch_sees_what_it_looks_for(tmp_path, act, event):
    """The test above could else pass by looking away."""
    report = os.memfd_create("events")
    child = os.fork()
    if not child:
        watch(report)
        try:
            act(tmp_path)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert event in os.pread(report, 1 << 20, 0).decode()
    os.close(report)


def _calls():
    """Yield (file, name) of every call in the package by its dotted name, and its node."""
    for path in sorted(Path(lengthwise.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield path.name, ast.unparse(node.func), node


def test_the_package_has_no_other_way_to_run_what_it_reads():
    """Pickles pass between two processes of ours alone, and torch reads files of plain loops without running them.

    YAML is composed, never constructed.
    """
    forbidden = re.compile(
        r"(builtins\.)?(eval|exec|compile|__import__)|(\w+\.)?Unpickler|yaml\.(\w*load\w*)"
        r"|(pickle|marshal|shelve|dill|joblib|cloudpickle|torch|jit|hub|np|numpy)\.(loads?|open)"
    )
    found = [(file, name, node) for file, name, node in _calls() if forbidden.fullmatch(name)]
    readers = ("trainer_state.py", "whole_state.py")
    inert = [node for file, name, node in found if file in readers and name == "torch.load"]
    assert {(file, name) for file, name, node in found if node not in inert} == {
        ("process.py", "pickle.load"),
        ("node_feed_process.py", "pickle.load"),
    }
    for node in inert:
        (given,) = [each.value for each in node.keywords if each.arg == "weights_only"]
        assert isinstance(given, ast.Constant)
        assert given.value is True


def test_remote_code_is_never_trusted():
    """There is no flag for it; every place that could is told not to."""
    values = []
    for file, name, node in _calls():
        given = [each.value for each in node.keywords if each.arg == "trust_remote_code"]
        assert all(isinstance(each, ast.Constant) and each.value is False for each in given), (file, name)
        values += given
        if re.fullmatch(r"Auto\w+\.from_pretrained", name):
            assert given, (file, name)
    assert values
    assert "trust_remote_code" not in RunConfig.model_fields
