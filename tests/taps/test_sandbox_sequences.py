"""Random sequences of what scripts do to files, each on a real folder and on one inside the sandbox."""

from __future__ import annotations

import json

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.taps.scripts import plain, write
from tests.taps.trial_folder import in_a_trial, state

PLAYER = """
import json, os, pathlib, shutil, sys

def tree():
    found = []
    for folder, folders, files in os.walk("."):
        folders.sort()
        found += [[os.path.join(folder, name) + "/"] for name in folders]
        found += [[os.path.join(folder, name), open(os.path.join(folder, name)).read()] for name in files]
    return sorted(found)

def play(kind, a, b):
    if kind in ("w", "a", "r+", "x", "w+", "a+"):
        with open(a, kind) as f:
            f.write(b[:2])
            return f.tell()
    if kind == "read": return open(a).read()
    if kind == "touch": return pathlib.Path(a).touch()
    if kind == "makedirs": return os.makedirs(a, exist_ok=True)
    if kind == "listdir": return sorted(os.listdir(a))
    if kind == "scandir": return sorted((e.name, e.is_dir()) for e in os.scandir(a))
    if kind == "glob": return sorted(map(str, pathlib.Path(a).glob("*")))
    if kind == "size": return os.stat(a).st_size if os.path.isfile(a) else os.path.isdir(a)
    if kind == "truncate": return os.truncate(a, 1)
    if kind in ("mkdir", "remove", "rmdir"): return getattr(os, kind)(a)
    if kind in ("rename", "replace"): return getattr(os, kind)(a, b)
    if kind == "copytree" and (b + "/").startswith(a + "/"): return None  # endless, with or without a sandbox
    return str(getattr(shutil, kind)(*((a,) if kind == "rmtree" else (a, b))))

said = []
for number, steps in enumerate(json.load(open(sys.argv[1]))):
    os.chdir(os.path.join(sys.argv[2], str(number)))
    for kind, a, b in steps:
        try:
            result = play(kind, a, b)
        except (OSError, shutil.Error) as error:
            result = type(error).__name__
        said.append([number, kind, a, b, result])
    said.append([number, tree()])
print(json.dumps(said))
"""


KINDS = ["w", "a", "r+", "x", "w+", "a+", "read", "touch", "makedirs", "mkdir", "remove", "rmdir", "rmtree", "rename",
         "replace", "copy", "copytree", "move", "listdir", "scandir", "glob", "size", "truncate"]  # fmt: skip


PATHS = ["f", "g", "d", "d/f", "d/g", "d/e", "d/e/f", "n", "n/f", "n/e", "n/e/g"]


# An example is two processes, so none is spent on making a failing one smaller.
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(KINDS), st.sampled_from(PATHS), st.sampled_from(PATHS)), min_size=12, max_size=25
        ),
        min_size=60,
        max_size=60,
    )
)
def test_any_sequence_of_operations_looks_as_on_a_real_folder(tmp_path_factory, plays: list) -> None:
    root = tmp_path_factory.mktemp("sandbox")
    (root / "plays.json").write_text(json.dumps(plays))
    write(root, "player.py", PLAYER)
    for place in ("real", "guarded"):
        for number in range(len(plays)):
            write(root / place / str(number), "f", "old f")
            write(root / place / str(number), "d/f", "old d/f")
            write(root / place / str(number), "d/e/f", "old d/e/f")
    before = state(root / "guarded")
    expected = plain(root, "player.py", "plays.json", str(root / "real"))
    assert expected.code == 0, expected.err
    done = in_a_trial(root, root / "scratch", "player.py", "plays.json", str(root / "guarded"))
    assert done.code == 0, done.err
    assert state(root / "guarded") == before
    other = [(a, b) for a, b in zip(json.loads(expected.out), json.loads(done.out)) if a != b]
    assert other == []
