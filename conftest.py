"""How the tests run: several at a time, and on a machine where a lesson has passed, not again until it changes."""

pytest_plugins = ("tests.in_parallel", "tests.unchanged")
