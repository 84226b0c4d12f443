import pytest

import gradfree.benchmarks.reports.publication


@pytest.fixture(autouse=True)
def _unpainted(request, monkeypatch):
    """Reports have a file for a picture, which takes two seconds to paint where reports are what is tested."""
    if request.path.parent.name != "reports":
        monkeypatch.setattr(gradfree.benchmarks.reports.publication, "picture", lambda charts: "")
