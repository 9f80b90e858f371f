"""A stage process that computes nothing: it opens its shard, listens, and waits."""

import json
import socket
import sys
from pathlib import Path

config = json.loads(sys.stdin.readline())
folder = Path(config["shard_folder"])
manifest = json.loads((folder / "manifest.json").read_bytes())
weights = folder / manifest["stages"][config["stage"]]["weights"]["name"]
if config["device"] != "CPU":
    print(json.dumps({"state": "failed", "detail": f"There is no device {config['device']}."}), flush=True)
    sys.exit(1)
with weights.open("rb") as file, socket.create_server(("127.0.0.1", config["port"])) as server:
    file.read(1)
    port = server.getsockname()[1]
    print(json.dumps({"state": "ready", "port": port}), flush=True)
    sys.stdin.read()
