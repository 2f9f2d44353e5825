"""The table of modules is current."""

from tools import module_map


def test_table_of_modules():
    assert module_map.PAGE.read_text() == module_map.page(), "run python -m tools.module_map"
