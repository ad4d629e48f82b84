"""Run an experiment by its number: python -m experiments 0001 [--quick]."""

import argparse
import runpy
import sys

from experiments.harness import EXPERIMENTS

folders = sorted(EXPERIMENTS.glob("[0-9]*-*"))
parser = argparse.ArgumentParser(
    prog="python -m experiments",
    description="Measure again what experiments/NNNN-name/README.md reports. Each is run.py in its folder.",
    epilog="\n".join(folder.name for folder in folders),
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
parser.add_argument("number", choices=[folder.name[:4] for folder in folders])
parser.add_argument("--quick", action="store_true", help="smallest sizes, to see that it works; writes no result")
args = parser.parse_args()
run = next(folder for folder in folders if folder.name.startswith(args.number)) / "run.py"
sys.argv = [str(run), *(["--quick"] if args.quick else [])]
sys.path.insert(0, str(run.parent))  # an experiment may have modules of its own beside run.py
runpy.run_path(str(run), run_name="__main__")
