"""What a node checks of an answer that it is to go on with."""

from __future__ import annotations

import pytest

from common.errors import RequestError
from node.resume import NOTHING, Resume, check_length, read_resume


def test_an_answer_so_far_is_read_with_what_was_reported_of_it() -> None:
    value = {"output_ids": [1, 2], "output_token_logprobs": [[-1.0, 1, None], [-2.0, 2, None]]}
    found = read_resume(value, 10, 1, logprobs=True)
    assert (found.output_ids, found.token_logprobs, found.top_logprobs) == ([1, 2], value["output_token_logprobs"], [])
    assert read_resume(None, 10, 5, logprobs=True) == NOTHING


@pytest.mark.parametrize(
    ("length", "param"), [(3, None), (4, "resume.output_ids"), (7, "resume.output_ids")], ids=["fits", "done", "longer"]
)
def test_there_has_to_be_a_token_left(length: int, param: str | None) -> None:
    resume = Resume(output_ids=[1] * length)
    if param is None:
        check_length(resume, 10, 4, 100)
        return
    with pytest.raises(RequestError) as caught:
        check_length(resume, 10, 4, 100)
    assert caught.value.param == param


def test_prompt_and_answer_so_far_have_to_fit_the_pages() -> None:
    """A prefill node computes both, so its pages have to hold both: it would wait for ever otherwise."""
    check_length(Resume(output_ids=[1] * 10), 30, 100, 40)
    with pytest.raises(RequestError) as caught:
        check_length(Resume(output_ids=[1] * 11), 30, 100, 40)
    assert (caught.value.code, caught.value.param) == ("too_many_tokens", "resume.output_ids")
