"""A scorer as a user writes one. It says who asked for what in the folder JUDGED, and waits for the file RELEASE."""

import json
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

JUDGED = Path(os.environ["JUDGED"])


class Judge(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (JUDGED / f"{os.getpid()}-{time.monotonic_ns()}.json").write_text(json.dumps(asked))
        while "RELEASE" in os.environ and not Path(os.environ["RELEASE"]).exists():
            time.sleep(0.02)
        answer = json.dumps({"reward": asked["hidden"]["worth"]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


print("judging", sorted(os.environ), str(Path.cwd()), flush=True)
ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Judge).serve_forever()
