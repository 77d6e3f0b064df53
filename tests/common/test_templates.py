"""Templates: what they replace, and that no template costs more than its size."""

import pytest

from common.errors import InvalidInput
from common.suggestions import did_you_mean
from common.tasks import templates
from common.tasks.graders import check_fields

SAMPLE = {"output_text": "95", "output_json": 95, "output_tools": []}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("", ""),
        ("plain }} text {{", "plain }} text {{"),
        ("a {{ item.x }}{{sample.output_text}} b", "a 195 b"),
        ("{{item.list.1}}: {{item.list}}", '2: [1, 2, "ü"]'),
        ("{ {{item.x}} }", "{ 1 }"),
    ],
)
def test_variables_are_replaced_and_all_else_stays(template: str, text: str) -> None:
    assert templates.render(template, {"x": 1, "list": [1, 2, "ü"]}, SAMPLE) == text


@pytest.mark.parametrize("unit", ["{{", "{{{", "}}{{", "{{ {", "{{a"])
def test_a_template_of_braces_is_read_once(unit: str) -> None:
    template = (unit * 32_000)[:64_000]
    try:
        assert templates.variables(template) == []
    except InvalidInput as error:
        assert len(str(error)) < 300


def test_a_path_of_many_steps_is_refused_by_its_length() -> None:
    with pytest.raises(InvalidInput, match="at most 256 characters, not 60002"):
        templates.variables("{{item" + ".a" * 29_999 + "}}")


def test_a_number_of_many_digits_is_no_index() -> None:
    with pytest.raises(InvalidInput, match="no such field"):
        templates.lookup("item.list." + "9" * 200, {"list": [1]}, SAMPLE)


def test_a_long_template_is_refused_with_its_length() -> None:
    with pytest.raises(InvalidInput, match="at most 65536 characters, not 200000"):
        templates.variables("{{" * 100_000)


def test_a_text_that_would_be_too_long_is_refused_before_it_is_made() -> None:
    with pytest.raises(InvalidInput, match="more than 2097152 characters"):
        templates.render("{{item.a}}" * 6000, {"a": "x" * 30_000}, SAMPLE)
    with pytest.raises(InvalidInput, match="more than 2097152 characters"):
        templates.render("{{item.a}}" * 6000, {"a": ["x" * 1000] * 30}, SAMPLE)
    assert len(templates.render("{{item.a}}" * 60, {"a": "x" * 30_000}, SAMPLE)) == 1_800_000


def test_a_suggestion_is_not_sought_among_long_words() -> None:
    long = "ab" * 10_000
    assert did_you_mean(long, [long + "c"]) == ""
    assert did_you_mean("ab", [long, "abc"]) == "; did you mean 'abc'?"
    with pytest.raises(InvalidInput, match="no such field"):
        check_fields(["b" * 60], {f"{'b' * 59}{i}": 1 for i in range(100_000)})
