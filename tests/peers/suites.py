"""Runs the tests of jaxamp, jmp and jamp, unchanged, against flax_amp.

    python tests/peers/suites.py [directory]        # or: make test-peers

It downloads their source distributions (into the directory, where they are kept), and
prints a table. A test that fails must be named in `DIFFERENCES`, and one that is named
there must fail; otherwise the exit status is 1.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree

HERE = pathlib.Path(__file__).resolve().parent

SUITES = {  # package: test file -> whether it can run
    "jaxamp==0.0.4": {"tests/test_amp.py": True},
    "jmp==0.0.4": {
        "jmp/_src/loss_scale_test.py": True,
        "jmp/_src/policy_test.py": False,
    },
    "jamp==0.0.6": {"tests/loss_scale_test.py": True, "tests/policy_test.py": False},
}

LEAVES = "every value of a scaler is a leaf, so that a checkpoint holds it"
ONES = "a scale of 1 multiplies by it: float16 and bfloat16 runs share one structure"
FLOATS = "an integer is taken for a scale, and becomes a float32"
PRIVATE = "flax_amp selects with its own flags only, so none is checked"
DIFFERENCES = {  # test of jmp and jamp: the contract of flax_amp
    "test_no_op_loss_scale": ONES,
    "test_static_empty_trees_NoOpLossScale": LEAVES,
    "test_static_empty_trees_StaticLossScale": f"{LEAVES}; a scale of 0 is an error",
    "test_dynamic_loss_scale_tree": LEAVES,
    "test_dynamic_loss_scale_raises_type_error_on_int_loss_scale": FLOATS,
    "test_dynamic_loss_scale_raises_type_error_on_int_min_loss_scale": FLOATS,
    "test_select_tree_rejects_non_scalar": PRIVATE,
}
NO_TREE_CASTS = "flax_amp casts equations, not trees, which `policy_test.py` tests"


def source(package, folder):
    """Returns the unpacked source distribution of a package, from pip."""
    name, version = package.split("==")
    root = folder / f"{name}-{version}"
    if not root.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        pip += ["--no-binary", ":all:", "--dest", str(folder), package]
        subprocess.run(pip, check=True)
        with tarfile.open(folder / f"{root.name}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return root


def pytest(folder, paths, *options):
    """Runs pytest in a folder, without any configuration."""
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", "."]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "JAX_PLATFORMS": "cpu",
    }
    ran = subprocess.run(
        [*command, "-p", "no:cacheprovider", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    return ran.stdout


def outcomes(test):
    """Returns `{test: whether it failed}` of a test file, outside of its package."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(test, folder)
        options = ["-p", "peer_stand_ins", "--junit-xml", "out.xml", test.name]
        told = pytest(folder, [HERE.parents[1], HERE], *options)
        cases = ElementTree.parse(pathlib.Path(folder, "out.xml")).iter("testcase")
        failed = {case.get("name"): len(case) > 0 for case in cases}
    if not failed or test.stem in failed or "error" in told.splitlines()[-1]:
        raise RuntimeError(f"{test} did not run:\n{told}")
    return failed


def number_of_tests(root, test):
    """Counts the tests of a file that needs its own package."""
    told = pytest(root, [root], "--collect-only", test)
    return int(re.search(r"^(\d+) tests? collected", told, re.MULTILINE)[1])


def main(folder):
    print("| suite | tests | pass | other contract | not applicable |")
    print("| --- " * 5 + "|")
    wrong = []
    for package, tests in SUITES.items():
        root = source(package, folder)
        for test, can_run in tests.items():
            failed = outcomes(root / test) if can_run else {}
            wrong += [f"{test}::{n}" for n in failed if failed[n] != (n in DIFFERENCES)]
            left_out = 0 if can_run else number_of_tests(root, test)
            bad = sum(failed.values())
            counts = len(failed) + left_out, len(failed) - bad, bad, left_out
            row = f"{package}, `{test}`", *map(str, counts)
            print(f"| {' | '.join(row)} |", flush=True)
    print("\nNot applicable:", NO_TREE_CASTS)
    print("\n".join(f"{name}: {why}" for name, why in DIFFERENCES.items()))
    if wrong:
        print("\nother than expected:", *wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(main(pathlib.Path(sys.argv[1]).resolve()))
    with tempfile.TemporaryDirectory() as directory:
        sys.exit(main(pathlib.Path(directory)))
