import pytest

from tests.parallel.near_ties import NEAR_TIE, TALLY


@pytest.fixture(scope="session", autouse=True)
def _near_ties_are_told(request):
    yield
    reporter = request.config.pluginmanager.getplugin("terminalreporter")
    if TALLY["comparisons"] and reporter is not None:
        reporter.write_line(
            f"\nnear-ties (< {NEAR_TIE}): {TALLY['ties']} of {TALLY['sequences']} sequences ({TALLY['tokens']} tokens) in "
            f"{TALLY['comparisons']} comparisons of ranks with one process"
        )
