// Calls of the API, with the key of this tab.

const KEY = "marlaas.key";
const JOBS = "/v1/fine_tuning/jobs";
export const session = {isOperator: false, tenants: [], tenant: ""};

export const key = () => sessionStorage.getItem(KEY);
export const keep = (value) => sessionStorage.setItem(KEY, value);
export const forget = () => sessionStorage.removeItem(KEY);

export class ApiError extends Error {
  constructor(status, body) {
    super(body?.error?.message ?? `the service answered ${status}`);
    this.status = status;
    this.code = body?.error?.code ?? null;
    this.param = body?.error?.param ?? null;
  }
}

async function ask(method, path, {query = {}, body, form, tenant, signal, headers = {}} = {}) {
  const asked = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const sent = {Authorization: `Bearer ${key()}`, ...headers};
  if (session.isOperator && tenant) sent["MARLaaS-Tenant"] = tenant;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  const options = {method, headers: sent, signal, body: form ?? (body === undefined ? undefined : JSON.stringify(body))};
  const answer = await fetch(asked.length ? `${path}?${new URLSearchParams(asked)}` : path, options);
  if (!answer.ok) throw new ApiError(answer.status, await answer.json().catch(() => null));
  return answer;
}

export const get = async (path, options) => (await ask("GET", path, options)).json();
export const post = async (path, body, options) => (await ask("POST", path, {...options, body})).json();
export const text = async (path, options) => (await ask("GET", path, options)).text();
export const job = (id, options) => get(`${JOBS}/${encodeURIComponent(id)}`, options);
export const ofJob = (id, part, options) => get(`${JOBS}/${encodeURIComponent(id)}/${part}`, options);
export const command = (id, action) => post(`${JOBS}/${encodeURIComponent(id)}/${action}`, {});

/** Who the key belongs to. Throws ApiError for an unknown one. */
export async function enter() {
  try {
    session.isOperator = false;
    session.tenant = (await get("/v1/usage")).tenant;
  } catch (error) {
    if (error.code !== "tenant_key_needed") throw error;
    session.isOperator = true;
    session.tenants = (await get("/v1/admin/tenants")).data;
  }
}

/** All jobs of a tenant, newest first, a page at a time; the next is asked for while one is shown. */
export async function* jobs(tenant, signal) {
  const page = (after) => get(JOBS, {query: {limit: 100, after}, tenant, signal});
  let next = page(null);
  while (next) {
    const found = await next;
    next = found.has_more ? page(found.last_id) : null;
    next?.catch(() => null); // whoever stops here does not hear of it
    yield found.data;
  }
}

export async function upload(file) {
  const form = new FormData();
  form.append("purpose", "fine-tune");
  form.append("file", file);
  return (await ask("POST", "/v1/files", {form})).json();
}

/** Hands a file to the browser's downloads. */
export async function download(path, filename, options) {
  const url = URL.createObjectURL(await (await ask("GET", path, options)).blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = filename;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

/** Server-sent events of one answer, each {id, data}. */
async function* sent(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const fields = Object.fromEntries(block.split("\n").filter((line) => line && line[0] !== ":").map((line) => {
        const at = line.indexOf(":");
        return [line.slice(0, at), line.slice(at + 1).replace(/^ /, "")];
      }));
      if ("data" in fields) yield fields;
    }
  }
}

/** Events of a job as they come, behind `after`. Goes on behind the last one when the connection breaks; ends with the job. */
export async function* follow(id, after, {tenant, signal}) {
  let last = after;
  while (!signal.aborted) {
    try {
      const headers = last ? {"Last-Event-ID": last} : {};
      for await (const event of sent(await ask("GET", `${JOBS}/${encodeURIComponent(id)}/events`, {query: {stream: true}, headers, tenant, signal}))) {
        if (event.id) last = event.id;
        const data = JSON.parse(event.data);
        if (data.error) throw new Error(data.error.message);
        yield data;
      }
      return;
    } catch (error) {
      if (signal.aborted || error instanceof ApiError && error.status < 500) return;
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
}

/** The pieces of a completion: {text, version, reason}. */
export async function* chat(body, signal) {
  const answer = await ask("POST", "/v1/chat/completions", {body: {...body, stream: true}, signal});
  for await (const event of sent(answer)) {
    if (event.data === "[DONE]") return;
    const data = JSON.parse(event.data);
    if (data.error) throw new ApiError(500, data);
    const choice = data.choices[0];
    if (choice) yield {text: choice.delta.content ?? "", version: data.system_fingerprint, reason: choice.finish_reason};
  }
}
