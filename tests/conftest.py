"""Options and fixtures of the whole test suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--num-seeds",
        default=200,
        help="random cases per fault test (default 200); dear ones take a fraction. `make test-long` raises it.",
    )


@pytest.fixture(scope="session")
def num_seeds(request: pytest.FixtureRequest) -> int:
    return int(request.config.getoption("--num-seeds"))
