"""Web pages as devices, over real HTTP: the answers that a browser shares with a page."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from fedone_sdk.aggregator.http.guards import CorsConfig, Limits
from tests.integration.test_security import CLAIM, FLEET, ROOT, serving

APP = "https://app.example"
PAGES = CorsConfig(origins=(APP, "capacitor://localhost"))
CLAIMING = "/v1/assignments/claim"


def asks(method: str = "POST", origin: str = APP) -> dict[str, Any]:
    asked = {"Origin": origin, "Access-Control-Request-Method": method}
    return {"headers": {**asked, "Access-Control-Request-Headers": "authorization"}}


def shared(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("Access-Control")}


async def test_a_page_takes_part() -> None:
    # Preflights come without a token: they count nowhere, and need none.
    async with serving(cors=PAGES, limits=Limits(requests_per_minute_per_ip=2)) as server:
        for origin in (APP, APP, APP, "capacitor://localhost"):
            status, _, response = await server.call("OPTIONS", CLAIMING, **asks(origin=origin))
            assert status == 204
            assert response.headers["Access-Control-Allow-Origin"] == origin
            assert response.headers["Access-Control-Allow-Methods"] == "GET, POST"
            allowed = response.headers["Access-Control-Allow-Headers"].lower().split(", ")
            assert {"authorization", "content-type", "fedone-protocol"} < set(allowed)
            assert response.headers["Access-Control-Max-Age"] == "7200"
            assert "Access-Control-Allow-Credentials" not in response.headers
            assert response.headers["Vary"] == "Origin"
        origin = {"Origin": APP}
        body: dict[str, Any] = {}
        _, document, response = await server.call(
            "POST", "/v1/clients", body, token=FLEET, headers=origin
        )
        assert response.headers["Access-Control-Allow-Origin"] == APP
        exposed = response.headers["Access-Control-Expose-Headers"].split(", ")
        assert {"Retry-After", "Date", "FedOne-Protocol"} < set(exposed)
        # A page can read refusals, too.
        status, _, response = await server.call("POST", CLAIMING, CLAIM, token="x", headers=origin)
        assert status == 401
        assert response.headers["Access-Control-Allow-Origin"] == APP
        token = document["credential"]
        status, _, _ = await server.call("POST", CLAIMING, CLAIM, token=token, headers=origin)
        assert status == 200


FOREIGN = ("https://evil.example", "null", f"{APP}.evil.example", "")


@pytest.mark.parametrize(
    ("cors", "origin"), [(CorsConfig(), APP), *((PAGES, origin) for origin in FOREIGN)]
)
async def test_other_pages_do_not(cors: CorsConfig, origin: str) -> None:
    async with serving(cors=cors) as server:
        status, _, response = await server.call("OPTIONS", CLAIMING, **asks(origin=origin))
        assert (status, shared(response.headers)) == (405, {})
        _, credential = await server.enrol(FLEET)
        _, _, response = await server.call(
            "POST", CLAIMING, CLAIM, token=credential, headers={"Origin": origin}
        )
        assert shared(response.headers) == {}
        # Without it a cache would give the response to our pages.
        assert response.headers.get("Vary") == ("Origin" if cors.origins else None)


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/runs"), ("POST", "/v1/runs/acme-1/stop"), ("DELETE", "/v1/runs/acme-1")],
)
async def test_no_page_does_what_people_do(method: str, path: str) -> None:
    async with serving(cors=PAGES) as server:
        status, _, response = await server.call("OPTIONS", path, **asks(method))
        assert (status, shared(response.headers)) == (405, {})
        headers = {"Origin": APP}
        _, _, response = await server.call("GET", "/v1/clients", token=ROOT, headers=headers)
        assert shared(response.headers) == {}


@pytest.mark.parametrize(
    "origin", ["*", "https://*.example", f"{APP}/", f"{APP}/page", "app.example", "null", ""]
)
def test_what_is_no_origin(origin: str) -> None:
    with pytest.raises(ValidationError, match=r"must be an origin .* without a path or \*"):
        CorsConfig(origins=(origin,))


def test_origins_are_kept_as_browsers_send_them() -> None:
    given = ("https://App.example:443", "http://localhost:5173", "http://[::1]:80")
    assert CorsConfig(origins=given).origins == (APP, "http://localhost:5173", "http://[::1]")


@pytest.mark.parametrize("path", ["/wrong/v1/clients", "/v1/nothing", "/v2/clients"])
async def test_a_page_reads_that_a_path_is_wrong(path: str) -> None:
    async with serving(cors=PAGES) as server:
        status, _, response = await server.call("OPTIONS", path, **asks())
        assert (status, response.headers["Access-Control-Allow-Origin"]) == (204, APP)
        for origin in (APP, "https://other.example"):
            status, _, response = await server.call("POST", path, {}, headers={"Origin": origin})
            assert status == 404
            assert ("Access-Control-Allow-Origin" in response.headers) is (origin == APP)
