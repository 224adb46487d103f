"""The join in ten lines of bare pyarrow, which the README shows: it has to work as it stands there."""

from __future__ import annotations

import re

import pyarrow as pa

import dovetail
from harness import ROOT, Server

# <bare-pyarrow>
BARE_PYARROW = """
import json
import pyarrow as pa
import pyarrow.flight as flight

client = flight.connect("grpc://127.0.0.1:8815")
for name, table in {"orders": orders, "lineitem": lineitem}.items():
    writer, _ = client.do_put(flight.FlightDescriptor.for_path(name), table.schema)
    writer.write_table(table)
    writer.close()                                     # the table appears now, in whole
join = {"left": "orders", "right": "lineitem", "on": [{"left": "o_orderkey", "right": "l_orderkey"}]}
info = client.get_flight_info(flight.FlightDescriptor.for_command(json.dumps({"join": join})))
result = pa.concat_tables(client.do_get(endpoint.ticket).read_all() for endpoint in info.endpoints)
"""
# </bare-pyarrow>


def test_the_join_in_bare_pyarrow_works(server: Server, client: dovetail.Client) -> None:
    orders = pa.table({"o_orderkey": [1, 2, 3], "o_orderdate": ["mon", "tue", "wed"]})
    lineitem = pa.table({"l_orderkey": [1, 1, 3, 4], "l_quantity": [10, 20, 30, 40]})
    names = {"orders": orders, "lineitem": lineitem}
    exec(BARE_PYARROW.replace("grpc://127.0.0.1:8815", server.uri), names)
    result: pa.Table = names["result"]  # type: ignore[assignment]
    assert result.sort_by("l_quantity").to_pydict() == {
        "o_orderkey": [1, 1, 3],
        "o_orderdate": ["mon", "mon", "wed"],
        "l_quantity": [10, 20, 30],
    }


def test_the_readme_shows_that_text() -> None:
    shown = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    assert re.sub(r"\s+", " ", BARE_PYARROW).strip() in shown
