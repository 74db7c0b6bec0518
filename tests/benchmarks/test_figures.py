from __future__ import annotations

import json
from pathlib import Path

from benchmarks.figures import Figure, circumstances, write_figures


def test_results_are_a_list_of_figures_with_their_circumstances(tmp_path: Path) -> None:
    figures = [
        Figure("a.rate", 3.0, 2.0, "higher", "1/s"),
        Figure("a.size", 3.0, 2.0, "lower", "MB"),
        Figure("a.free", 3.0, None, "lower", "MB"),
    ]

    path = write_figures(tmp_path / "new", "a_cpu2", "A", figures, circumstances("box", ["orjson"]))

    written = json.loads(path.with_suffix(".json").read_text())
    assert [row["figure"] for row in written] == ["a.rate", "a.size", "a.free"]
    assert written[0].keys() == {
        *("figure", "value", "goal", "better", "unit"),
        *("machine", "versions", "command", "date", "commit"),
    }
    assert [figure.is_met for figure in figures] == [True, False, None]
    assert "| a.size | 3 | ≤ 2, missed | MB |" in path.read_text()
