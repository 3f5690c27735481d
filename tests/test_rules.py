"""The table of rules fits the sources: every text stands there once, every test exists. `make test-rules` takes them out and looks."""

from pathlib import Path

import pytest
from rules.table import RULES

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("rule", RULES, ids=[rule.name.replace(" ", "-") for rule in RULES])
def test_a_rule_is_where_the_table_says(rule):
    assert rule.removed_from(ROOT) != (ROOT / rule.file).read_text()
    assert rule.tests and rule.missing_tests(ROOT) == []
    assert rule.gpu == any(test.startswith("test_store_gpu.py") for test in rule.tests)


def test_every_hazard_has_its_rules():
    assert {rule.hazard for rule in RULES} == set(range(1, 9))
    assert len({rule.name for rule in RULES}) == len(RULES)
