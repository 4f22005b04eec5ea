// What the page asks of the server, and sends to it. The cookie goes by itself; the key is kept for this very origin,
// port included, and goes as a header.

const KEY = "amends.key";

export class Refusal extends Error {
  constructor(status, { code, message, next }) {
    super(message);
    this.name = "Refusal";
    this.status = status;
    this.code = code;
    this.next = next || "";
  }
}

function headers(more) {
  return { "x-amends-key": localStorage.getItem(KEY) || "", ...more };
}

async function answer(response) {
  const document = await response.json().catch(() => null);
  if (response.ok && document) return document;
  const unknown = { code: "unreadable", message: `The server answered ${response.status}.`, next: "" };
  throw new Refusal(response.status, document?.error || unknown);
}

export async function ask(path, options = {}) {
  return answer(await fetch(path, { headers: headers(), cache: "no-store", ...options }));
}

export async function send(path, body) {
  const head = headers({ "content-type": "application/json" });
  return answer(await fetch(path, { method: "POST", headers: head, body: JSON.stringify(body) }));
}

export async function enter(link) {
  try {
    localStorage.setItem(KEY, (await send("/api/enter", { link })).key);
    return true;
  } catch (error) {
    if (error instanceof Refusal) return false;
    throw error;
  }
}

export async function inside() {
  if (!localStorage.getItem(KEY)) return false;
  try {
    await ask("/api/inside");
    return true;
  } catch (error) {
    if (error instanceof Refusal) return false;
    throw error;
  }
}

// Server-sent events, read by hand: an EventSource cannot send the header. Calls `heard(name, data)` for each event and
// `state(word)` for how it goes, until `signal` says stop; comes back by itself after a break.
export async function follow(heard, state, signal) {
  let pause = 500;
  while (!signal.aborted) {
    try {
      const response = await fetch("/api/live", { headers: headers(), cache: "no-store", signal });
      if (!response.ok) await answer(response);
      state("live");
      await events(response.body, (name, data) => {
        if (name !== "trouble") pause = 500; // what is in trouble is asked less and less often
        heard(name, data);
      });
      state("off");
    } catch (error) {
      if (signal.aborted) return;
      state(error instanceof Refusal && error.status === 401 ? "out" : "off");
      if (error instanceof Refusal && error.status === 401) return;
    }
    await new Promise((done) => setTimeout(done, pause));
    pause = Math.min(pause * 2, 8000);
  }
}

async function events(body, heard) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const lines = Object.fromEntries(part.split("\n").map((line) => line.split(/: ?(.*)/s, 2)));
      if (lines.event) heard(lines.event, JSON.parse(lines.data));
    }
  }
}
