// Makes elements. Texts of a run are only ever set as text, never parsed as markup.

function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'style') Object.assign(node.style, value);
    else node.setAttribute(name, value === true ? '' : value);
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

function card(title, ...children) {
  const { note, id } = typeof title === 'object' ? title : {};
  const text = typeof title === 'object' ? title.title : title;
  return h('section', { class: 'card', id }, h('div', { class: 'card-head' }, h('h2', {}, text)),
    note ? h('p', { class: 'note' }, note) : null, children);
}

function missing(text) {
  return h('p', { class: 'missing' }, text);
}

// A table of texts: columns [{title, number}], rows of cells (a text or an element each).
function grid(columns, rows, caption) {
  const head = columns.map((c) => h('th', { scope: 'col', class: c.number ? 'number' : null }, c.title));
  const body = rows.map((cells) => h('tr', {}, cells.map((cell, i) => h(
    i ? 'td' : 'th', { scope: i ? null : 'row', class: columns[i].number ? 'number' : null },
    cell === null || cell === undefined ? '–' : cell))));
  return h('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': caption },
    h('table', {}, h('caption', { class: 'unseen' }, caption),
      h('thead', {}, h('tr', {}, head)), h('tbody', {}, body)));
}

function choice(label, options, value, onchange) {
  const list = options.map(([key, text]) => h('option', { value: key, selected: key === value }, text));
  const select = h('select', { onchange: () => onchange(select.value) }, list);
  return h('label', { class: 'field' }, h('span', {}, label), select);
}

// Buttons, one of which is pressed.
function segments(label, options, value, onchange) {
  const buttons = options.map(([key, text, title]) => h('button', {
    type: 'button', title, 'data-key': key, 'aria-pressed': String(key === value),
    onclick: () => {
      for (const b of buttons) b.setAttribute('aria-pressed', String(b.dataset.key === key));
      onchange(key);
    },
  }, text));
  return h('div', { class: 'segments', role: 'group', 'aria-label': label }, buttons);
}

const whole = new Intl.NumberFormat('en-GB', { maximumFractionDigits: 0 });

function number(value, digits = 3) {
  if (value === null || value === undefined) return '–';
  if (value === 0) return '0';
  const size = Math.abs(value);
  if (size >= 1e7 || size < 1e-4) return signed(Number(value.toPrecision(digits)).toExponential());
  if (size >= 1000) return signed(whole.format(value));
  return signed(String(Number(value.toPrecision(digits))));
}

function signed(text) {
  return text.replace(/^-/, '−').replace('e-', 'e−').replace('e+', 'e');
}

function plus(value, format = number) {
  return `${value > 0 ? '+' : ''}${format(value)}`;
}

function share(value, digits = 1) {
  return value === null || value === undefined ? '–' : `${signed((100 * value).toFixed(digits))}\u00a0%`;
}

function seconds(value) {
  if (value === null || value === undefined) return '–';
  if (value === 0) return '0 s';
  if (value < 1e-3) return `${number(1e6 * value, 2)} µs`;
  if (value < 1) return `${number(1000 * value, 3)} ms`;
  if (value < 100) return `${number(value, 3)} s`;
  const total = Math.round(value);
  const [hours, minutes] = [Math.floor(total / 3600), Math.floor((total % 3600) / 60)];
  if (hours >= 48) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${total % 60} s`;
}

function bytes(value) {
  if (value === null || value === undefined) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let i = 0;
  let left = value;
  while (left >= 1024 && i < units.length - 1) { left /= 1024; i += 1; }
  return `${number(left, 3)} ${units[i]}`;
}

function count(n, one, several = `${one}s`) {
  return `${whole.format(n)} ${n === 1 ? one : several}`;
}
