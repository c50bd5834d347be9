// The service's API: one place for the key, for errors in words, and for server-sent events.
const KEY = "hallutracer.key";
const GONE = "The service did not answer. Is it still running?";

export class ServiceError extends Error {
  constructor(message, { status = 0, code = "", param = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, param, retryAfter });
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

async function request(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServiceError(GONE);
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  let told = {};
  try {
    told = (await response.json()).error ?? {};
  } catch { /* not ours: a proxy's page */ }
  const after = Number(response.headers.get("retry-after")) || null;
  return new ServiceError(told.message ?? `The service answered ${response.status}.`, {
    status: response.status, code: told.code, param: told.param, retryAfter: after,
  });
}

export async function getJson(path) {
  return (await request(path)).json();
}

const post = (body, signal) => request("score", {
  method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal,
});

export async function score(body, signal) {
  return (await post(body, signal)).json();
}

// The documents of a stream, up to [DONE].  Throws ServiceError where the service or the connection fails under way.
export async function* stream(body, signal) {
  const response = await post({ ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServiceError("The connection broke before the answer was complete.");
    }
    if (part.done) throw new ServiceError("The connection ended before the answer was complete.");
    const events = (rest + part.value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data === "[DONE]") return;
      const document = JSON.parse(data);
      if (document.error) throw new ServiceError(document.error.message, document.error);
      yield document;
    }
  }
}
