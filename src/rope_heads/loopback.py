"""An OpenAI-compatible chat server on 127.0.0.1 for a model that runs here: real HTTP, nothing reachable from outside the machine."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LONGEST_REQUEST = 4_000_000  # bytes

Respond = Callable[[dict], tuple[int, bytes]]  # request body -> status, response body


def completions(small) -> Respond:
    """Answers /v1/chat/completions with `small` (a SmallModel), one request at a time, greedily whatever temperature is asked for."""
    lock = threading.Lock()

    def respond(request: dict) -> tuple[int, bytes]:
        chat = [{"role": turn["role"], "content": text_of(turn["content"])} for turn in request["messages"]]
        with lock:
            reply = small.complete(chat, min(int(request.get("max_completion_tokens") or request.get("max_tokens") or 16), 64))
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": reply.text}}
        usage = {"prompt_tokens": reply.input_tokens, "completion_tokens": reply.output_tokens,
                 "total_tokens": reply.input_tokens + reply.output_tokens}  # fmt: skip
        answer = {"id": "local", "object": "chat.completion", "created": int(time.time()), "model": request.get("model", ""), "choices": [choice],
                  "usage": usage}  # fmt: skip
        return 200, json.dumps(answer).encode()

    return respond


def text_of(content) -> str:
    """The text of a message, which is a string or a list of parts."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    respond: Respond

    def do_POST(self):
        try:
            length = int(self.headers.get("Content-Length", ""))
            if not 0 <= length <= LONGEST_REQUEST:
                raise ValueError(f"Content-Length must be 0 to {LONGEST_REQUEST}, got {length}")
            if self.path.rstrip("/") != "/v1/chat/completions":
                return self.send(404, b'{"error": {"message": "only /v1/chat/completions is served"}}')
            request = json.loads(self.rfile.read(length))
            self.send(*self.respond(request))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.send(400, json.dumps({"error": {"message": f"unreadable request: {error}"}}).encode())
        return None

    def send(self, status: int, body: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the caller gave up
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *args):  # requests hold whole prompts and headers: they are not logged
        pass


@contextlib.contextmanager
def serving(respond: Respond, handler: type[Handler] = Handler) -> Iterator[str]:
    """Serves on a free port of 127.0.0.1 while the block runs; yields the base address, http://127.0.0.1:PORT/v1."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), {"respond": staticmethod(respond)}))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
