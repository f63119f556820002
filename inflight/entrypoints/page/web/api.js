// What the page asks the server. The key is kept in the session of the browser's tab, and sent as a header only.

import { ask } from "./dom.js";

const KEY = "inflight-key";
let asking = null;

/** An answer of the server that is an error, or no answer at all (status 0). */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(more) {
  const key = sessionStorage.getItem(KEY);
  return key ? { ...more, Authorization: `Bearer ${key}` } : more;
}

/** Ask for the key. All requests that need one wait for the same dialog. */
function askForKey(wasWrong) {
  asking ??= ask("This server asks for a key", [{ name: "key", label: "API key", isSecret: true }], {
    ok: "Use this key",
    about: (wasWrong ? "The server did not accept the last one. " : "") + "It is kept until this tab is closed.",
  }).then((given) => {
    asking = null;
    if (given) sessionStorage.setItem(KEY, given.key.trim());
    return given !== null;
  });
  return asking;
}

/**
 * Send a request; if the server wants a key, ask for it once and send the request again.
 * @param {string} path below the address of the page, without a slash before it
 * @returns {Promise<Response>} with a status of 200 to 299
 */
export async function send(path, { method = "GET", body, signal, asksKey = true } = {}) {
  for (;;) {
    const sent = sessionStorage.getItem(KEY);
    let response;
    try {
      response = await fetch(path, {
        method, signal, cache: "no-store", credentials: "same-origin",
        headers: headers(body === undefined ? {} : { "Content-Type": "application/json" }),
        body: body === undefined ? undefined : JSON.stringify(body),
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError(0, "The server does not answer. It may have ended, or the network is down.");
    }
    if (response.ok) return response;
    if (response.status === 401 && asksKey) {
      const isNew = sessionStorage.getItem(KEY) !== sent;
      if (isNew || (await askForKey(Boolean(sent)))) continue;
    }
    throw new ServerError(response.status, await messageOf(response));
  }
}

async function messageOf(response) {
  try {
    const body = await response.json();
    const error = body.error ?? body;
    return String(error.message ?? error.detail ?? error);
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

export async function getJson(path, options) {
  return (await send(path, options)).json();
}

/**
 * The data of each server-sent event of a response, as text.
 * @throws {ServerError} the connection ended before the stream did
 */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ServerError(0, "The connection to the server was lost.");
      }
      if (part.done) return;
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
