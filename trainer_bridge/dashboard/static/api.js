// Calls to the server, and its events. The token comes in the address's fragment, which no server ever sees.

const fragment = new URLSearchParams(location.hash.slice(1)).get("token");
if (fragment) {
  sessionStorage.setItem("zerodrift.token", fragment);
  history.replaceState(null, "", location.pathname + location.search);
}

function headers() {
  const token = sessionStorage.getItem("zerodrift.token");
  return token ? { authorization: `Bearer ${token}` } : {};
}

export class ApiError extends Error {
  constructor(message, status) { super(message); this.status = status; }
}

async function call(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: headers() });
  } catch {
    throw new ApiError("", 0);
  }
  if (!response.ok) {
    const text = await response.text();
    let message = text;
    try { message = JSON.parse(text).error; } catch { /* not JSON: shown as it is */ }
    throw new ApiError(message, response.status);
  }
  return response;
}

const run = (name) => `api/runs/${encodeURIComponent(name)}`;
const range = (step) => (step === null ? "" : `?first=${step}&last=${step}`);
const json = async (path, options) => (await call(path, options)).json();
const which = (request, index) => `?request=${encodeURIComponent(request)}&index=${index}`;

export const api = {
  runs: () => json("api/runs"),
  run: (name) => json(run(name)),
  step: (name, step) => json(`${run(name)}/steps/${step}`),
  distribution: (name, step) => json(`${run(name)}/distribution${range(step)}`),
  where: (name, step) => json(`${run(name)}/where${range(step)}`),
  worst: (name, step) => json(`${run(name)}/worst${range(step)}`),
  samples: (name, step) => json(`${run(name)}/steps/${step}/samples`),
  sample: (name, step, request, index) => json(`${run(name)}/steps/${step}/sample${which(request, index)}`),
  explain: (name, step, request, index) => json(`${run(name)}/steps/${step}/explain${which(request, index)}`, { method: "POST" }),
  explainer: () => json("api/explainer"),
  async sampleFile(name, step, request, index, side) {
    return (await call(`${run(name)}/steps/${step}/sample.jsonl${which(request, index)}&side=${side}`)).blob();
  },
};

// Server-sent events over fetch, since EventSource cannot carry a token. Reconnects for ever; onState says how it is.
export async function listen(onChange, onState) {
  let known = null;
  for (;;) {
    try {
      const response = await call("api/events");
      onState("on");
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let buffer = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        buffer += value;
        let end;
        while ((end = buffer.indexOf("\n\n")) >= 0) {
          const data = buffer.slice(0, end).split("\n").find((line) => line.startsWith("data: "));
          buffer = buffer.slice(end + 2);
          if (!data) continue;
          const event = JSON.parse(data.slice(6));
          // After a gap anything may have changed.
          if (event.runs.length || (known !== null && known !== event.sequence)) onChange(event.runs);
          known = event.sequence;
        }
      }
    } catch (error) {
      if (!(error instanceof ApiError || error instanceof TypeError)) throw error;
    }
    onState("off");
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}
