"""A gateway process that schedules nothing: it looks for its tokenizer and its stages, listens, and waits."""

import json
import socket
import sys
from pathlib import Path

config = json.loads(sys.stdin.readline())
(Path(config["shard_folder"]) / "tokenizer_config.json").read_bytes()
for stage in config["stages"]:
    socket.create_connection(("127.0.0.1", stage["port"]), timeout=5).close()
with socket.create_server(("127.0.0.1", config["port"])) as server:
    port = server.getsockname()[1]
    print(json.dumps({"state": "ready", "port": port, "http_port": config["http_port"] or 8000}), flush=True)
    sys.stdin.read()
