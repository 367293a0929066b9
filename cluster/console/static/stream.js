// What the server sends, over one stream that is opened again whenever it ends.

const RETRY_MS = 1000;

export const apiKey = {
  get: () => sessionStorage.getItem("kvorum-key") ?? "",
  set: (key) => (key ? sessionStorage.setItem("kvorum-key", key) : sessionStorage.removeItem("kvorum-key")),
};

function headers() {
  const key = apiKey.get();
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** GET below /console; throws an Error with the server's message and its status. */
export async function get(path, signal) {
  const response = await fetch(path, { headers: headers(), signal });
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  let message = `${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {}
  return Object.assign(new Error(message), { status: response.status });
}

/** Follows the stream: onEvent hears each event, onState "live", "lost" or "refused" with a message. */
export class Stream {
  constructor(onEvent, onState) {
    this.onEvent = onEvent;
    this.onState = onState;
    this.query = "";
    this.abort = null;
  }

  /** Open the stream, in place of the one that is open, with a query such as engine=…&sequence=…. */
  open(query = this.query) {
    this.close();
    this.query = query;
    this.abort = new AbortController();
    this.follow(this.abort.signal);
  }

  close() {
    this.abort?.abort();
    this.abort = null;
  }

  async follow(signal) {
    while (!signal.aborted) {
      try {
        const response = await get(`stream?${this.query}`, signal);
        this.onState("live", "live");
        for await (const event of events(response.body)) {
          if (signal.aborted) return;
          if (event.error) throw new Error(event.error.message);
          this.onEvent(event);
        }
        throw new Error("the stream ended");
      } catch (error) {
        if (signal.aborted) return;
        const isRefused = [400, 401, 403].includes(error.status);
        this.onState(isRefused ? "refused" : "lost", error.message, error.status);
        if (isRefused) return;
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      }
    }
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value;
      const whole = text.split("\n\n");
      text = whole.pop();
      for (const event of whole) yield JSON.parse(event.slice("data: ".length));
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
