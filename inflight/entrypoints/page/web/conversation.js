// A conversation is a tree of messages: an edited message and a second answer are branches. Plain data, so it can be exported.
//
// conversation: {id, title, created, updated, system, nodes: {id -> node}, chosen: {parent id -> child id}}
// node: {id, parent, role, content, files, …}; an answer also has {reasoning, calls, finish, error, stats}; the result of a
// call has {callId, name}. A file is {name, type, text} or {name, type, url} (an image as a data: URL).

const ROOT = "";
export const FORMAT = "inflight-conversations";

export function newId() {
  return crypto.getRandomValues(new Uint32Array(3)).reduce((text, part) => text + part.toString(36), "");
}

export function newConversation(system = "") {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, system, nodes: {}, chosen: {} };
}

/** Add a message behind `parent`, and choose its branch. Returns it. */
export function addNode(conversation, parent, values) {
  const node = { id: newId(), parent: parent ?? ROOT, role: "user", content: "", files: [], ...values };
  conversation.nodes[node.id] = node;
  conversation.chosen[node.parent] = node.id;
  conversation.updated = Date.now();
  if (!conversation.title && node.role === "user" && node.content) conversation.title = titleOf(node.content);
  return node;
}

function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line;
}

/** The messages behind `parent`, in the order in which they were made. */
export function childrenOf(conversation, parent) {
  return Object.values(conversation.nodes).filter((node) => node.parent === (parent ?? ROOT));
}

/** The messages of the chosen branches, from the first one on. */
export function shownPath(conversation) {
  const path = [];
  let at = ROOT;
  for (;;) {
    const next = conversation.nodes[conversation.chosen[at]];
    if (next === undefined || path.includes(next)) return path;
    path.push(next);
    at = next.id;
  }
}

/** Which branch is shown at a message, how many there are, and a function that chooses another one. */
export function branchesAt(conversation, node) {
  const all = childrenOf(conversation, node.parent);
  const index = all.indexOf(node);
  return {
    index, count: all.length,
    choose: (step) => { conversation.chosen[node.parent] = all[(index + step + all.length) % all.length].id; },
  };
}

/** Remove a message and all behind it. */
export function removeNode(conversation, node) {
  for (const child of childrenOf(conversation, node.id)) removeNode(conversation, child);
  delete conversation.nodes[node.id];
  delete conversation.chosen[node.id];
  if (conversation.chosen[node.parent] === node.id) {
    const left = childrenOf(conversation, node.parent);
    if (left.length) conversation.chosen[node.parent] = left[left.length - 1].id;
    else delete conversation.chosen[node.parent];
  }
}

/** The messages as the server reads them, up to `last` (a node; without it all that are shown). */
export function messagesOf(conversation, last) {
  const messages = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  for (const node of shownPath(conversation)) {
    messages.push(messageOf(node));
    if (node === last) break;
  }
  return messages;
}

function messageOf(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.callId, content: node.content };
  if (node.role === "assistant") {
    const message = { role: "assistant", content: node.content };
    if (node.reasoning) message.reasoning_content = node.reasoning;
    if (node.calls?.length) {
      message.tool_calls = node.calls.map((call) => ({
        id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
      }));
    }
    return message;
  }
  const texts = node.files.filter((file) => file.text !== undefined).map(fenced);
  const text = [...texts, node.content].filter(Boolean).join("\n\n");
  const images = node.files.filter((file) => file.url !== undefined);
  if (!images.length) return { role: node.role, content: text };
  const parts = images.map((file) => ({ type: "image_url", image_url: { url: file.url } }));
  return { role: node.role, content: text ? [...parts, { type: "text", text }] : parts };
}

function fenced(file) {
  const longest = Math.max(2, ...(file.text.match(/`+/g) ?? []).map((ticks) => ticks.length));
  const fence = "`".repeat(longest + 1);
  return `${file.name}\n${fence}\n${file.text}\n${fence}`;
}

export function exported(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

/**
 * Read an exported file. Each conversation gets a new id, so that nothing is written over.
 * @throws {Error} it is not such a file
 */
export function imported(text) {
  const given = JSON.parse(text);
  if (given?.format !== FORMAT || !Array.isArray(given.conversations)) throw new Error(`it has no "format": "${FORMAT}"`);
  return given.conversations.map((conversation) => {
    const nodes = {};
    for (const [id, node] of Object.entries(conversation.nodes ?? {})) {
      if (!["user", "assistant", "tool"].includes(node?.role)) throw new Error(`a message has the role ${node?.role}`);
      const files = (Array.isArray(node.files) ? node.files : [])
        .map((file) => ({ name: String(file.name), type: String(file.type), ...(file.text !== undefined
          ? { text: String(file.text) } : { url: String(file.url) }) }))
        .filter((file) => file.url === undefined || /^data:image\/[a-z+.-]+;base64,/.test(file.url));
      const calls = Array.isArray(node.calls)
        ? node.calls.map((call) => ({ id: String(call.id), name: String(call.name), arguments: String(call.arguments) }))
        : undefined;
      nodes[id] = { ...node, id, parent: String(node.parent ?? ROOT), content: String(node.content ?? ""),
        reasoning: String(node.reasoning ?? ""), error: node.error ? String(node.error) : "", calls, files };
    }
    const made = newConversation(String(conversation.system ?? ""));
    return { ...made, title: String(conversation.title ?? ""), nodes, chosen: { ...conversation.chosen } };
  });
}
