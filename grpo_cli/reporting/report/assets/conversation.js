// Shows a prompt and its completion: a string, a chat, or an episode turn by turn.

function parsed(text, fallback = null) {
  try { return JSON.parse(text); } catch { return fallback; }
}

// Returns the messages of a text in the form of a chat; null for any other, such as a model's own.
function messagesOf(text) {
  const found = text.startsWith('[{"role": ') ? parsed(text) : null;
  const isMessage = (m) => m && typeof m === 'object' && typeof m.role === 'string';
  return Array.isArray(found) && found.every(isMessage) ? found : null;
}

function contentOf(message) {
  const { content } = message;
  if (typeof content === 'string') return content;
  if (!Array.isArray(content)) return content ? JSON.stringify(content) : '';
  return content.map((part) => (part?.type === 'image' || part?.image ? '[image]\n' : part?.text ?? JSON.stringify(part))).join('');
}

function callsOf(message) {
  return (message.tool_calls || []).map((call) => {
    const made = call.function || call;
    const given = typeof made.arguments === 'string' ? made.arguments
      : Object.entries(made.arguments || {}).map(([k, v]) => `${k}=${JSON.stringify(v)}`).join(', ');
    return `${made.name}(${given})`;
  });
}

function messageBox(role, body, { foreign = false, extra = null, title = role } = {}) {
  return h('div', { class: `message ${['system', 'user', 'assistant', 'tool'].includes(role) ? role : 'other'}${foreign ? ' is-foreign' : ''}` },
    h('p', { class: 'role' }, title, extra), h('div', { class: 'said' }, body));
}

function promptBoxes(text) {
  const messages = messagesOf(text);
  if (!messages) return [messageBox('prompt', text, { foreign: true })];
  return messages.map((m) => messageBox(m.role, contentOf(m), { foreign: true }));
}

function completionBoxes(table, i, mode) {
  const cells = table.episodes[i];
  const messages = cells?.messages ? parsed(cells.messages, []) : [];
  const colours = mode !== 'none' && hasTokens(table, i);
  if (!messages.length) return [messageBox('assistant', colours ? tokenSpans(table, i, mode) : table.completion[i], { title: 'completion' })];
  const turns = (parsed(cells.turns, []) || []).filter((t) => t.by === 'model');
  let number_ = 0;
  return messages.map((m) => {
    const calls = callsOf(m).map((c) => h('code', { class: 'call' }, c));
    if (m.role !== 'assistant') return messageBox(m.role, [contentOf(m), ...calls], { foreign: true, title: m.name ? `${m.role} ${m.name}` : m.role });
    const turn = turns[number_];
    number_ += 1;
    const body = colours && turn ? tokenSpans(table, i, mode, turn.start, turn.end) : [contentOf(m), ...calls];
    const extra = turn && turn.reward !== null && turn.reward !== undefined ? h('span', { class: 'pill' }, `reward ${number(turn.reward)}`) : null;
    return messageBox('assistant', body, { title: `assistant, turn ${number_} `, extra });
  });
}

function imagesOf(table, i) {
  const numbers = table.images?.[i] || [];
  if (!numbers.length) return null;
  return h('div', { class: 'pictures' }, numbers.map((n) => {
    if (n < 0) return h('p', { class: 'missing' }, n === -1 ? 'image left out (size of the report)' : 'image not stored, or unreadable');
    const [width, height] = table.pictures.sizes[n];
    return h('figure', {}, h('img', { src: table.pictures.urls[n], alt: `image of the prompt, ${width} × ${height} pixels`, class: Math.max(width, height) < 100 ? 'pixels' : null }),
      h('figcaption', {}, `${width} × ${height}`));
  }));
}
