// Addresses of what is shown of a job's samples.

/** The address of these samples with some parameters changed; null takes one away. */
export function addressOf({id, params}, changes) {
  const all = {...Object.fromEntries(params), tab: "samples", ...changes};
  return `#/job/${encodeURIComponent(id)}?${new URLSearchParams(Object.entries(all).filter(([, value]) => value !== null && value !== ""))}`;
}

/** Notes in the address what is shown now, without showing it again: the focus stays where it is. */
export function note(view, changes) {
  const address = addressOf(view, changes);
  view.params = new URLSearchParams(address.split("?")[1]);
  history.replaceState(null, "", address);
}

/** A parameter that is a whole number; null if it is none. */
export function numberIn(params, name) {
  const text = params.get(name);
  return text !== null && /^\d+$/.test(text) ? Number(text) : null;
}
