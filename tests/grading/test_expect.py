"""What is left of the old judges' words: notes that must be empty, and logs that match rules."""

import torch
from torch import nn

from ddp_course.grading.vocabulary.expect import follows, nothing
from ddp_course.grading.vocabulary.observe import Log
from ddp_course.grading.vocabulary.play import Note, Seen


def test_a_note_that_must_be_empty_tells_what_was_found():
    clean, dirty = Seen(None, 0, [Note(trouble="")]), Seen(None, 0, [Note(trouble="a crumb")])
    expect = nothing("trouble", "a clean table", "wipe it")
    assert expect(clean) is None
    assert (expect(dirty).expected, expect(dirty).found, expect(dirty).cause) == ("a clean table", "a crumb", "wipe it")


def test_a_log_is_matched_rule_by_rule():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Log(model, optimizer) as log:
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert log.text == "FBFBU"
    order = follows(("(FB)*U", "%(n)s passes", "pairs"), ("(.*F){%(n)s}[^F]*", "%(n)s forward passes", "not %(n)s"))
    assert order(Seen(None, 0, [Note(logs=[log.text], n=2)])) is None
    fault = order(Seen(None, 0, [Note(logs=[log.text], n=3)]))
    assert (fault.expected, fault.cause) == ("3 forward passes", "not 3")
