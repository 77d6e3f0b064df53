"""Graders: their shapes, their rewards, and what happens when one fails."""

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import AsyncGenerator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import pytest_asyncio

from common.errors import InvalidInput
from common.tasks.graders import check_item, check_sources, item_fields, validate_grader
from env_service.failures import GraderFailed
from env_service.graders.attempt import Attempt
from env_service.graders.endpoint import Endpoints
from env_service.graders.runner import Grade, GraderRunner
from env_service.graders.text import TextComparer
from env_service.sandbox.sandbox import Sandbox
from env_service.work import Allowance
from tests.support.processes import descendants, left_behind


async def grade_async(
    grader: dict[str, Any],
    output: str,
    item: dict[str, Any] | None = None,
    *,
    hosts: str = "",
    timeout_s: float = 5.0,
) -> Grade:
    async with graders(hosts, timeout_s) as runner:
        return await graded(runner, grader, output, item)


@contextlib.asynccontextmanager
async def graders(hosts: str = "", timeout_s: float = 5.0) -> AsyncGenerator[GraderRunner]:
    endpoints, comparer, sandbox = Endpoints(hosts), TextComparer(), Sandbox()
    try:
        yield GraderRunner(sandbox=sandbox, endpoints=endpoints, text_comparer=comparer, timeout_s=timeout_s)
    finally:
        await comparer.close()
        await endpoints.close()
        await sandbox.close()


async def graded(
    runner: GraderRunner, grader: dict[str, Any], output: str, item: dict[str, Any] | None = None
) -> Grade:
    return await runner.grade(validate_grader(grader), Attempt(item or {}, output), key="job/0/0/0/0")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runner() -> AsyncGenerator[GraderRunner]:
    """One for many tests: a helper process that compares texts takes a second to start."""
    async with graders() as made:
        yield made


in_module = pytest.mark.asyncio(loop_scope="module")


def grade(grader: dict[str, Any], output: str, item: dict[str, Any] | None = None, **options: Any) -> float:
    return asyncio.run(grade_async(grader, output, item, **options)).reward


def check(operation: str) -> dict[str, Any]:
    return {
        "type": "string_check",
        "name": "c",
        "input": "{{sample.output_text}}",
        "reference": "{{ item.answer }}",
        "operation": operation,
    }


def alike(metric: str) -> dict[str, Any]:
    return {
        "type": "text_similarity",
        "input": "{{sample.output_text}}",
        "reference": "{{item.answer}}",
        "evaluation_metric": metric,
    }


def python(source: str) -> dict[str, Any]:
    return {"type": "python", "source": source}


# ------------------------------------------------------------------------------------------------- string_check


@pytest.mark.parametrize(
    ("operation", "output", "answer", "reward"),
    [
        ("eq", "95", "95", 1.0),
        ("eq", "95 ", "95", 0.0),
        ("ne", "95", "96", 1.0),
        ("like", "it is Blue", "Blue", 1.0),
        ("like", "it is Blue", "blue", 0.0),
        ("ilike", "it is Blue", "bLUE", 1.0),
    ],
)
def test_string_check_compares(operation: str, output: str, answer: str, reward: float) -> None:
    assert grade(check(operation), output, {"answer": answer}) == reward


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{item.answer}}", r"{{item\.answer}}: there is no such field"),
        ("{{item.parts.2.x}}", r"{{item\.parts\.2}}: there is no such field"),
        ("{{sample.output_json.x}}", "the output is not JSON"),
    ],
)
def test_a_variable_without_a_value_fails_the_grader(text: str, reason: str) -> None:
    with pytest.raises(GraderFailed, match=reason):
        grade(check("eq") | {"reference": text}, "95]", {"question": "x", "parts": [{}, {"x": 1}]})


def test_a_variable_may_lead_into_objects_and_lists() -> None:
    grader = check("eq") | {"input": "{{sample.output_json.a.0}}", "reference": "{{item.parts.1.x}}"}
    assert grade(grader, '{"a": [95]}', {"parts": [{}, {"x": 95}]}) == 1.0


def test_a_reference_with_braces_is_not_a_template() -> None:
    assert grade(check("eq"), "{{item.secret}}", {"answer": "{{item.secret}}"}) == 1.0


# ---------------------------------------------------------------------------------------------- text_similarity


async def compared(
    comparer: TextComparer, grader: dict[str, Any], text: str, reference: str, *, timeout_s: float
) -> float:
    made: Any = validate_grader(grader)
    return await comparer.reward(made, Attempt({"answer": reference}, text), Allowance(timeout_s))


METRICS = ("fuzzy_match", "bleu", "gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l")


@in_module
@pytest.mark.parametrize("metric", METRICS)
async def test_similarity_is_one_for_the_same_text_and_less_for_another(runner: GraderRunner, metric: str) -> None:
    text = "the quick brown fox jumps over the lazy dog"
    texts = (text, "the quick brown fox sleeps under the lazy dog", "")
    same, some, none = [(await graded(runner, alike(metric), each, {"answer": text})).reward for each in texts]
    assert (same, none) == pytest.approx((1.0, 0.0), abs=1e-9) and 0 <= some < 1


def test_a_comparison_of_long_texts_ends_at_its_limit_and_the_next_one_works() -> None:
    long = " ".join(str(n % 7) for n in range(3_000))

    async def both() -> float:
        comparer = TextComparer()
        with pytest.raises(GraderFailed, match="longer than"):
            await compared(comparer, alike("rouge_l"), long, long[::-1], timeout_s=0.1)
        found = await compared(comparer, alike("rouge_l"), "a b", "a b", timeout_s=20)
        await comparer.close()
        return found

    assert asyncio.run(both()) == 1.0


def test_a_comparison_ends_with_its_worker() -> None:
    worker = (
        "import asyncio\nfrom tests.env.test_graders import TextComparer, alike, compared\n"
        "asyncio.run(compared(TextComparer(), alike('rouge_l'), '1 ' * 6000, '2 ' * 6000, timeout_s=50))"
    )
    assert left_behind(worker, num=1) == set()


@in_module
async def test_a_threshold_is_reported_beside_the_reward(runner: GraderRunner) -> None:
    result = await graded(runner, alike("rouge_1") | {"pass_threshold": 0.5}, "a b", {"answer": "a b c d"})
    assert result.parts == {"passed": 1.0}
    assert result.reward == pytest.approx(2 * 1 * 0.5 / 1.5), "the F-measure of words"


# ------------------------------------------------------------------------------------------------------- python


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ValueError('no')", "line 2: ValueError: no"),
        ("while True: pass", "longer than"),
        ("while True: print('x' * 10**6)", "printed more than"),
        ("return float('nan')", "nan"),
        ("return float('inf')", "inf"),
        ("return 10**400", "whole number of"),
        ("return 'one'", "'one'"),
        ("return None", "nothing"),
        ("return True", r"write float"),
        ("return [1]", "list"),
        ("import os; os._exit(0)", "without a result"),
        ("import os; os.fork()", "PermissionError|BlockingIOError"),
    ],
)
def test_a_python_grader_that_fails_gives_a_reason_and_no_reward(body: str, reason: str) -> None:
    with pytest.raises(GraderFailed, match=reason):
        grade(python(f"def grade(sample, item):\n    {body}"), "", timeout_s=1.0)


# -------------------------------------------------------------------------------------------------------- multi


def multi(formula: str) -> dict[str, Any]:
    parts = {"exact": check("eq"), "near": alike("rouge_1")}
    return {"type": "multi", "name": "m", "graders": parts, "calculate_output": formula}


@in_module
async def test_multi_combines_by_its_formula_and_reports_its_parts(runner: GraderRunner) -> None:
    result = await graded(runner, multi("0.75 * exact + min(near, 1) / 4"), "95", {"answer": "95"})
    assert result == Grade(1.0, {"exact": 1.0, "near": 1.0})


@in_module
async def test_a_formula_without_a_value_fails_the_grader(runner: GraderRunner) -> None:
    with pytest.raises(GraderFailed, match="division by zero"):
        await graded(runner, multi("near / exact"), "96", {"answer": "95"})


# --------------------------------------------------------------------------------------------------------- math


@pytest.mark.parametrize(
    ("output", "answer", "equal"),
    [
        ("The answer is 3/4.", "0.75", True),
        (r"\boxed{x^2+2x+2}", "(x+1)^2", False),
        ("no idea", "5", False),
    ],
)
@in_module
async def test_final_answers_are_compared_mathematically(
    runner: GraderRunner, output: str, answer: str, equal: bool
) -> None:
    assert (await graded(runner, {"type": "math"}, output, {"answer": answer})).reward == float(equal)


@pytest.mark.parametrize("answer", ["  ", "\\(" * 80_000])
def test_a_reference_without_an_answer_fails_the_grader(answer: str) -> None:
    with pytest.raises(GraderFailed, match="the reference is empty"):
        grade({"type": "math"}, "5", {"answer": answer})


# ----------------------------------------------------------------------------------------------------- endpoint


class Answers(BaseHTTPRequestHandler):
    """A user's endpoint; the path says how it behaves."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = self.path.strip("/")
        if kind == "slow":
            threading.Event().wait(3)
        if kind == "redirect":
            self.send_response(302)
            self.send_header("Location", "/good")
            self.end_headers()
            return
        self.send_response(500 if kind == "broken" else 200)
        self.end_headers()
        content = {
            "good": {"reward": float(body["sample"]["output_text"] == body["item"].get("answer"))},
            "header": {
                "reward": float(self.headers["X-Key"] == "k" and self.headers["Idempotency-Key"] == "job/0/0/0/0")
            },
            "json": {"reward": 1 if body["sample"]["output_json"] == {"a": [1, None]} else 2},
            "text": {"reward": "1"},
            "nothing": {},
            "nan": {"reward": float("nan")},
        }.get(kind, {"reward": 1, "x": "x" * 10**6 if kind == "large" else ""})
        with contextlib.suppress(ConnectionError):  # the grader has hung up
            self.wfile.write(json.dumps(content).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    httpd.server_close()


def endpoint(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "endpoint", "url": url, **more}


@pytest.mark.parametrize(("output", "reward"), [('{"a": [1, null]}', 1.0), ('{"a": [1, null]', 2.0), ("[" * 9999, 2.0)])
def test_code_and_endpoints_get_the_answer_parsed_if_it_is_json(server: str, output: str, reward: float) -> None:
    code = """
def grade(sample, item):
    assert list(sample) == ["output_text", "output_tools", "output_json"]
    return 1.0 if sample["output_json"] == {"a": [1, None]} else 2.0 if sample["output_json"] is None else 3.0
"""
    assert grade(python(code), output, {}) == reward
    assert grade(endpoint(f"{server}/json"), output, {}, hosts="127.0.0.1") == reward


def test_an_endpoint_gives_the_reward(server: str) -> None:
    assert grade(endpoint(f"{server}/good"), "95", {"answer": "95"}, hosts="127.0.0.1") == 1.0
    assert grade(endpoint(f"{server}/good"), "96", {"answer": "95"}, hosts="127.0.0.0/8") == 0.0
    assert grade(endpoint(f"{server}/header", headers={"X-Key": "k"}), "", {}, hosts="127.0.0.1") == 1.0


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("redirect", "status 302"),
        ("broken", "status 500"),
        ("text", "'1'"),
        ("nothing", 'no "reward"'),
        ("large", "bytes"),
    ]
    + [("nan", "nan"), ("slow", "no answer within")],
)
def test_an_endpoint_that_misbehaves_fails_the_grader(server: str, path: str, reason: str) -> None:
    with pytest.raises(GraderFailed, match=reason):
        grade(endpoint(f"{server}/{path}"), "", {}, hosts="127.0.0.1", timeout_s=0.5)


@pytest.mark.parametrize("hosts", ["", "example.org", "10.0.0.0/8", "*.0.0.1", "localhost"])
def test_an_address_that_the_operator_does_not_list_is_not_called(server: str, hosts: str) -> None:
    with pytest.raises(GraderFailed, match="operator does not allow"):
        grade(endpoint(f"{server}/good"), "", {"answer": ""}, hosts=hosts)


def test_a_listed_name_that_leads_to_a_private_address_is_not_called(server: str) -> None:
    local = endpoint(f"http://localhost:{server.rpartition(':')[2]}/good")
    with pytest.raises(GraderFailed, match="address of localhost"):
        grade(local, "", {"answer": ""}, hosts="localhost")
    assert grade(local, "", {"answer": ""}, hosts="localhost, 127.0.0.1, ::1") == 1.0


@pytest.mark.parametrize("host", ["[::ffff:127.0.0.1]", "[::1]", "169.254.169.254", "0.0.0.0"])
def test_other_spellings_of_private_addresses_are_not_called(host: str) -> None:
    with pytest.raises(GraderFailed, match="operator does not allow"):
        grade(endpoint(f"http://{host}/good"), "", {}, hosts="example.org")


def test_an_endpoint_that_is_not_there_fails_the_grader() -> None:
    with pytest.raises(GraderFailed, match="Connect"):
        grade(endpoint("http://127.0.0.1:9/"), "", {}, hosts="127.0.0.1")


# --------------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("grader", "message", "param"),
    [
        ({"type": "string_chek"}, "did you mean 'string_check'", "grader.type"),
        ({}, "unknown grader type None", "grader.type"),
        ({"type": ["math"]}, "unknown grader type", "grader.type"),
        ({"type": "score_model"}, "is missing", "grader.model"),
        (alike("cosine"), "cosine needs a download", "grader.evaluation_metric"),
        (alike("meteor"), "meteor needs a download", "grader.evaluation_metric"),
        (alike("rouge_9"), "rouge_1", "grader.evaluation_metric"),
        ({"type": "math", "inpt": "x"}, "did you mean 'input'", "grader.inpt"),
        (
            {"type": "math", "input": "{{sample.output_txt}}"},
            "did you mean {{sample.output_text}}",
            "grader.input",
        ),
        ({"type": "math", "input": "{{items.x}}"}, "begins with item or sample", "grader.input"),
        ({"type": "math", "input": "{{item}}"}, "names no field", "grader.input"),
        (check("equals"), "'eq'", "grader.operation"),
        (
            {"type": "string_check", "input": "", "operation": "eq"},
            "reference is missing",
            "grader.reference",
        ),
        (endpoint("ftp://host/"), "http://", "grader.url"),
        (endpoint("http://u:p@host/"), "password", "grader.url"),
        (endpoint("http://host/", headers={"Host": "x"}), "cannot be set", "grader.headers"),
        (multi("exact + nea"), "did you mean 'near'", "grader"),
        (multi("exact +"), "not an arithmetic expression", "grader"),
        (multi("__import__('os')"), "no function", "grader"),
        ({"type": "multi", "graders": {"m": multi("1")}, "calculate_output": "m"}, "m", "grader.graders.m"),
        (
            {"type": "multi", "graders": {"a": {"type": "math", "refernce": ""}}, "calculate_output": "a"},
            "'reference'",
            "grader.graders.a.refernce",
        ),
    ],
)
def test_a_wrong_grader_is_refused_by_name(grader: dict[str, Any], message: str, param: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        validate_grader(grader)
    assert message in str(caught.value)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("x = 1", "must define grade"),
        ("def grade(sample, item):\n    return 1 +", "line 2: invalid syntax"),
        ("def grade(sample, item)\n    return 1", "line 1: expected ':'"),
        ("grade = " + "(" * 150 + ")" * 150 + "[" * 2000, "line 1"),
        ("grade = " + "-" * 100_000 + "1", "it does not compile"),
        ("grade = 1\0", "null byte"),
    ],
)
def test_source_that_cannot_run_is_refused_when_it_is_given(source: str, fault: str) -> None:
    for grader in (python(source), {"type": "multi", "graders": {"own": python(source)}, "calculate_output": "own"}):
        with pytest.raises(InvalidInput, match=fault) as caught:
            check_sources(validate_grader(grader))
        assert caught.value.param in ("grader.source", "grader.graders.own.source")
    check_sources(validate_grader(python("import re\ngrade = lambda sample, item: len(re.findall('\\d', 'x'))")))


def test_the_fields_that_a_grader_needs_are_checked_against_a_row() -> None:
    grader = validate_grader(multi("exact"))
    assert item_fields(grader) == {"answer"}
    check_item(grader, {"answer": "95"})
    with pytest.raises(InvalidInput, match="did you mean 'answr'"):
        check_item(grader, {"answr": "95"})


async def test_helpers_that_are_killed_while_they_compare_are_no_fault_of_the_texts() -> None:
    comparer = TextComparer()
    known = descendants(os.getpid())
    long = "too long to be compared here " * 100
    asking = asyncio.create_task(compared(comparer, check("eq"), long, long, timeout_s=60))
    for _ in range(2):
        while not (helpers := descendants(os.getpid()) - known):
            await asyncio.sleep(0.01)
        for pid, _ in helpers:
            os.kill(pid, signal.SIGKILL)
        known |= helpers
    assert await asking == 1.0
    await comparer.close()
