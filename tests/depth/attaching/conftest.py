import pytest
from exact_engines import EXACT


@pytest.fixture(params=EXACT)
def engine(request):
    """An engine that is exact on chains of up to 10 links."""
    return EXACT[request.param]
