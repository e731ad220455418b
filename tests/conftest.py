"""Options and fixtures of the whole test suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--num-seeds",
        default=200,
        help="random cases per fault test (default 200); dear ones take a fraction. `make test-long` raises it.",
    )
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the decision logs of tests/golden anew instead of comparing with them.",
    )


@pytest.fixture(scope="session")
def num_seeds(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--num-seeds"))
