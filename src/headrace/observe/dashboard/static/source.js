// Where the page's data comes from: the server it was loaded from, or a block inside an exported page.

const block = document.getElementById("embedded");
const embedded = block ? JSON.parse(block.textContent) : null;
const TIMEOUT_MS = 30000;

/** Whether the run may still change under the page. */
export const live = embedded === null;

/** What an exported page says about itself: when it was made and what was left out. */
export const made = embedded ? embedded.made : null;

async function ask(path, parameters = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const text = query.toString();
  const response = await fetch(`api/${path}${text ? `?${text}` : ""}`, {
    signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  const body = await response.json();
  if (!response.ok) throw new Error(body.error || `HTTP ${response.status}`);
  return { body, version: response.headers.get("X-Run-Version") };
}

/** The run's version and when it last changed (unix seconds). */
export async function version() {
  return embedded ? { version: "exported", last_change: null } : (await ask("version")).body;
}

/** An answer about the whole run, with the version it is of. */
export async function aggregate(name) {
  if (embedded) return { value: embedded.answers[name], version: "exported" };
  const { body, version: of } = await ask(name);
  return { value: body, version: of };
}

/** A page of trajectories: { rows, next, complete }. */
export async function page(filter, before = null) {
  if (!embedded) return (await ask("trajectories", { ...filter, before })).body;
  return { rows: embedded.rows.filter((row) => matches(row, filter)), next: null, complete: true };
}

/** One trajectory without its tokens. */
export async function trajectory(id) {
  if (!embedded) return (await ask("trajectory", { id })).body;
  const found = embedded.details[id];
  if (!found) throw new Error(`trajectory ${id} is not in this export`);
  return found;
}

/** Tokens of one segment from `offset` on. */
export async function tokens(id, segment, offset = 0) {
  if (!embedded) return (await ask("tokens", { id, segment, offset })).body;
  const found = (embedded.tokens[id] || [])[segment];
  if (!found || offset > 0) throw new Error("these tokens are not in this export");
  return found;
}

// As the server's filter decides, over the rows that were embedded.
function matches(row, filter) {
  for (const name of ["stage", "purpose", "task", "group", "outcome"]) {
    if (filter[name] && row[name] !== filter[name]) return false;
  }
  const fate = row.step !== null ? "trained" : row.drop || "pending";
  if (filter.fate && fate !== filter.fate) return false;
  if (filter.failure && !row.reasons.includes(filter.failure)) return false;
  if (filter.forked && !embedded.details[row.id].tree.some((call) => call.fork)) return false;
  if (filter.min_reward && !(row.reward !== null && row.reward >= Number(filter.min_reward))) return false;
  if (filter.max_reward && !(row.reward !== null && row.reward <= Number(filter.max_reward))) return false;
  if (!filter.text) return true;
  const wanted = filter.text.trim().toLowerCase();
  const found = embedded.details[row.id];
  const texts = [row.id, row.reason, found.instance, ...row.reasons];
  for (const turn of found.turns) texts.push(turn.text, turn.reasoning);
  return texts.some((text) => text.toLowerCase().includes(wanted));
}
