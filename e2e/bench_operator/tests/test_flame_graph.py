from bench_operator.flame_graph import without_machine


def test_a_picture_names_modules_and_not_where_they_lie():
    svg = (
        '<text id="title">/opt/bin/py-spy record --pid=1 --output=/home/it.svg</text>'
        "<title>run (/opt/env/lib/python3.11/site-packages/aiohttp/client.py:5)</title>"
        "<title>take (/src/tree/operator/src/pdcluster_operator/runtime/queue.py:9)</title>"
        "<title>loads (/usr/lib/python3.11/json/__init__.py:1)</title>"
        '<svg xmlns="http://www.w3.org/2000/svg"><text>queue.py</text></svg>'
    )
    found = without_machine(svg)
    for kept in ("(aiohttp/client.py:5)", "(pdcluster_operator/runtime/queue.py:9)"):
        assert kept in found
    assert "(json/__init__.py:1)" in found
    assert 'xmlns="http://www.w3.org/2000/svg"' in found
    assert "/opt" not in found
    assert "/home" not in found
    assert "/src/tree" not in found
