from tests.parallel.near_ties import NEAR_TIE, TALLY


def pytest_terminal_summary(terminalreporter):
    if TALLY["comparisons"]:
        terminalreporter.write_line(
            f"near-ties (< {NEAR_TIE}): {TALLY['ties']} of {TALLY['sequences']} sequences ({TALLY['tokens']} tokens) in "
            f"{TALLY['comparisons']} comparisons of several ranks with one process"
        )
