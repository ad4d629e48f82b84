"""Training step of rl_jax against the same step in plain torch: python -m experiments 0001."""

import statistics
import tempfile
from pathlib import Path

from case import CASES, Case, quick, write
from matplotlib.figure import Figure

from experiments.harness import FLEET_PYTHON, TRAINER_PYTHON, Report, conditions, is_quick, publish
from experiments.worker import Worker

HERE = Path(__file__).parent
COMPARED_STEPS = 6
"""Later steps may differ: training at this learning rate amplifies the last bit of a sum about tenfold a step."""
STEP_TOLERANCE = 2e-3
"""Of the loss and gradient norm of a compared step, relative: float32 sums in another order, through Adam steps."""


def compare(index: int, case: Case, is_small: bool) -> dict[str, object]:
    """Let both programs take turns on the case."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = write(case, folder)
        with (
            Worker(TRAINER_PYTHON, HERE / "jax_step.py", folder / "jax.log") as ours,
            Worker(FLEET_PYTHON, HERE / "torch_step.py", folder / "torch.log") as theirs,
        ):
            sides = {"ours": ours, "torch": theirs}
            told = {side: w.ask("load", folder=name, case=index, is_quick=is_small) for side, w in sides.items()}
            answers = {side: [worker.ask("step", count=2)] for side, worker in sides.items()}  # compiles, warms up
            for _ in range(case.repeats):
                for side, worker in sides.items():
                    answers[side].append(worker.ask("step", count=case.steps))
    seconds = {side: [a["seconds"] for a in found[1:]] for side, found in answers.items()}
    speed = {side: sizes["tokens"] / statistics.median(values) for side, values in seconds.items()}
    traces = {
        side: {key: [value for answer in found for value in answer[key]] for key in ("losses", "norms")}
        for side, found in answers.items()
    }
    worst = max(
        abs(a - b) / abs(b)
        for key in ("losses", "norms")
        for a, b in zip(*(traces[side][key][:COMPARED_STEPS] for side in ("ours", "torch")), strict=True)
    )
    return {
        "case": case.name,
        **sizes,
        "seconds": seconds,
        "tokens/s": speed,
        "ratio": speed["ours"] / speed["torch"],
        "traces": traces,
        "largest relative difference": worst,
        "torch": told["torch"]["version"],
    }


def draw(found: list[dict]) -> Figure:
    """Draw the turns of both programs, one panel a case."""
    figure = Figure(figsize=(4.2 * len(found), 3.2), layout="constrained")
    for i, one in enumerate(found):
        axes = figure.add_subplot(1, len(found), i + 1)
        for side, seconds in one["seconds"].items():
            axes.plot(range(1, len(seconds) + 1), [one["tokens"] / s for s in seconds], "o-", label=side)
        axes.set(title=one["case"], xlabel="turn", ylabel="tokens/s", ylim=(0, None))
        axes.legend(frameon=False)
    return figure


def main() -> None:
    """Measure every case and report."""
    is_small = is_quick(__doc__)
    where = conditions()
    found = [compare(i, quick(case) if is_small else case, is_small) for i, case in enumerate(CASES)]
    for one in found:
        assert one["largest relative difference"] < STEP_TOLERANCE, f"not the same step: {one}"
    where["versions"] += f", torch {found[0]['torch']}"
    publish(
        HERE,
        Report(
            title="One training step, tokens/s",
            columns=["model", "tokens a step", "ours", "torch eager", "ours / torch", "same step to"],
            rows=[
                [
                    one["case"],
                    f"{one['tokens']:,} of {one['slots']:,} slots",
                    f"{one['tokens/s']['ours']:,.0f}",
                    f"{one['tokens/s']['torch']:,.0f}",
                    f"{one['ratio']:.2f}x",
                    f"{one['largest relative difference']:.0e}",
                ]
                for one in found
            ],
            notes=[
                f"same step to: largest relative difference of loss and gradient norm over the first {COMPARED_STEPS} steps"
            ],
            raw={"cases": found},
            figure=draw(found),
        ),
        where,
        is_small,
    )


main()
