// The browser of stored completions: search, filters, order, colours; a list, and one in full.

const LISTED = 200; // completions in the list; filters find the others
const MOST_ROWS = 12; // steps of the same problem
const FAILED = new Set(['env_error', 'env_timeout', 'parse_error']);
const FILTERS = [
  ['all', 'All', 'Every stored completion'],
  ['truncated', 'Truncated', 'Cut off by the limit of tokens'],
  ['failed', 'Errors and timeouts', 'No reward applied, or the environment failed, or the time was over'],
];
const ORDERS = [
  ['step', 'step and row'], ['newest', 'newest first'], ['advantage', 'highest advantage'], ['disadvantage', 'lowest advantage'],
  ['reward', 'highest reward'], ['unreward', 'lowest reward'], ['longest', 'longest'],
];

function completionsTab() {
  const host = h('div', { class: 'stack' });
  const open = async (i) => {
    host.replaceChildren(h('p', { class: 'loading', role: 'status' }, 'Unpacking the completions …'));
    const table = await completionsOf(i);
    const switcher = report.two ? segments('Run', report.runs.map((run, k) => [String(k), run.label]), String(i), (k) => open(Number(k))) : null;
    host.replaceChildren(...[switcher, browser(table, report.runs[i])].filter(Boolean));
    host.dataset.ready = 'true';
  };
  open(0);
  return host;
}

function browser(table, run) {
  const total = table.completion.length;
  if (!total) return missing(table.stored ? 'The report was written without completions.' : 'No completions are stored (log.completions_every).');
  const view = { filter: 'all', query: '', step: '', row: '', order: 'step', colours: hasAnyTokens(table) ? 'logprob' : 'none', found: [], open: 0 };
  const steps = [...new Set(table.step)];
  const list = h('ol', { class: 'list' });
  const detail = h('article', { class: 'detail', 'aria-live': 'polite' });
  const counter = h('p', { class: 'note', id: 'found', role: 'status' });
  const counts = {};
  for (const [key] of FILTERS) counts[key] = table.completion.filter((_, i) => passes(table, i, key)).length;
  const chips = FILTERS.map(([key, text, title]) => h('button', {
    type: 'button', class: 'chip', title, 'data-filter': key, 'aria-pressed': String(key === 'all'), disabled: !counts[key],
    onclick: () => {
      view.filter = key;
      for (const c of chips) c.setAttribute('aria-pressed', String(c.dataset.filter === key));
      update();
    },
  }, text, h('span', { class: 'count' }, whole.format(counts[key]))));
  const search = h('input', { type: 'search', id: 'search', placeholder: 'text of prompt or completion', autocomplete: 'off' });
  let waiting = 0;
  search.addEventListener('input', () => { clearTimeout(waiting); waiting = setTimeout(() => { view.query = search.value; update(); }, 120); });
  const row = h('input', { type: 'number', id: 'row', min: '0', placeholder: 'any', oninput: () => { view.row = row.value; update(); } });
  const stepBox = choice('Step', [['', 'all'], ...steps.map((s) => [String(s), String(s)])], '', (v) => { view.step = v; update(); });
  const orderBox = choice('Order', ORDERS, view.order, (v) => { view.order = v; update(); });
  const colours = segments('Colour tokens by', [['none', 'plain'], ['logprob', 'log-prob'], ['advantage', 'advantage']], view.colours, (v) => { view.colours = v; showOne(); });
  const legendHost = h('div', {});

  function update() {
    view.found = select(table, view);
    view.open = 0;
    showList();
  }

  function showList() {
    const more = view.found.length > LISTED ? `; the first ${LISTED} are listed` : '';
    counter.textContent = `${whole.format(view.found.length)} of ${count(total, 'completion')}${more}`;
    list.replaceChildren(...view.found.slice(0, LISTED).map((i, k) => h('li', {}, item(table, i, k, view, () => { view.open = k; mark(); showOne(true); }))));
    if (!view.found.length) list.replaceChildren(h('li', { class: 'missing' }, 'No completion matches.'));
    mark();
    showOne();
  }

  function mark() {
    list.querySelectorAll('button').forEach((b) => b.setAttribute('aria-current', String(Number(b.dataset.place) === view.open)));
  }

  function showOne(scroll = false) {
    legendHost.replaceChildren(...[colourLegend(hasAnyTokens(table) ? view.colours : 'none')].filter(Boolean));
    const i = view.found[view.open];
    detail.replaceChildren(...(i === undefined ? [] : one(table, i, view, run, goTo)).flat().filter(Boolean));
    if (scroll && matchMedia('(max-width: 860px)').matches) detail.scrollIntoView({ block: 'start' });
  }

  // Opens a completion of the same problem, even if the filters leave it out.
  function goTo(i) {
    view.open = view.found.indexOf(i);
    mark();
    detail.replaceChildren(...one(table, i, view, run, goTo).flat().filter(Boolean));
  }

  update();
  return h('div', { class: 'stack' },
    h('div', { class: 'toolbar' },
      h('label', { class: 'field grow' }, h('span', {}, 'Search'), search), stepBox, h('label', { class: 'field narrow' }, h('span', {}, 'Row'), row), orderBox,
      h('div', { class: 'field' }, h('span', {}, 'Colours'), colours)),
    h('div', { class: 'chips', role: 'group', 'aria-label': 'Filters' }, chips),
    h('p', { class: 'note' }, sentences(table).join(' ')),
    table.first_prompt ? h('details', { id: 'first-prompt' }, h('summary', {}, 'The first prompt, as the model reads it'),
      messageBox('prompt', table.first_prompt, { foreign: true })) : null,
    h('div', { class: 'browser' },
      h('div', { class: 'list-side' }, counter, list),
      h('div', { class: 'detail-side' }, legendHost, detail)));
}

function hasAnyTokens(table) {
  return table.tokens.some(Boolean);
}

// The note on completions that the report leaves out.
function sentences(table) {
  const said = [];
  const kept = table.completion.length;
  if (kept < table.stored) said.push(`${whole.format(kept)} of the ${count(table.stored, 'stored completion')}: those of ${new Set(table.step).size} of ${count(table.stored_steps, 'step')}.`);
  if (table.shortened) said.push(`${count(table.shortened, 'long completion')} without their middle.`);
  if (!hasAnyTokens(table)) said.push('No colours: the tokens are not stored, or the tokenizer is not on the machine that wrote the report.');
  else {
    const coloured = table.tokens.filter(Boolean).length;
    if (coloured < kept) said.push(`${whole.format(coloured)} completions have colours; the others are shown plain, for the size of the report.`);
  }
  if (table.pictures.left_out) said.push(`${count(table.pictures.left_out, 'image')} left out, for the size of the report.`);
  return said;
}

function hasFailed(table, i) {
  const cells = table.episodes[i];
  return table.reward[i] === null || Boolean(cells && (cells.env_error || FAILED.has(cells.stop_reason)));
}

// Whether a completion passes one of FILTERS.
function passes(table, i, filter) {
  return filter === 'truncated' ? table.finish[i] === 'length' : filter === 'all' || hasFailed(table, i);
}

function select(table, view) {
  const query = view.query.trim().toLowerCase();
  if (query) table.lower ??= { completion: table.completion.map((t) => t.toLowerCase()), texts: table.texts.map((t) => t.toLowerCase()) };
  const found = [];
  for (let i = 0; i < table.completion.length; i++) {
    const p = table.problem[i];
    if (view.step !== '' && table.step[i] !== Number(view.step)) continue;
    if (view.row !== '' && table.problems[p][0] !== Number(view.row)) continue;
    if (!passes(table, i, view.filter)) continue;
    if (query && !table.lower.completion[i].includes(query) && !table.lower.texts[table.problems[p][1]].includes(query)) continue;
    found.push(i);
  }
  const keys = {
    step: (i) => table.step[i], newest: (i) => -table.step[i],
    advantage: (i) => -(table.advantage[i] ?? -Infinity), disadvantage: (i) => table.advantage[i] ?? Infinity,
    reward: (i) => -(table.reward[i] ?? -Infinity), unreward: (i) => table.reward[i] ?? Infinity,
    longest: (i) => -(table.tokens[i]?.ids.length ?? table.completion[i].length),
  };
  const key = keys[view.order];
  return found.sort((a, b) => key(a) - key(b) || a - b);
}

function verdict(table, i) {
  if (!table.right) return null;
  return h('i', { class: `verdict ${table.right[i] ? 'good' : 'bad'}`, role: 'img', 'aria-label': table.right[i] ? 'right' : 'wrong' }, table.right[i] ? '✓' : '✗');
}

function preview(text, length = 90) {
  const messages = messagesOf(text);
  const plain = messages ? contentOf(messages[messages.length - 1]) : text;
  const line = plain.replace(/\s+/g, ' ').trim();
  return line.length > length ? `${line.slice(0, length)}…` : line;
}

function item(table, i, place, view, onclick) {
  const p = table.problem[i];
  const picture = table.images?.[i]?.find((n) => n >= 0);
  return h('button', { type: 'button', class: 'item', 'data-place': place, 'data-index': i, onclick },
    picture === undefined ? null : h('img', { src: table.pictures.urls[picture], alt: '', class: 'thumb' }),
    h('span', { class: 'item-text' },
      h('span', { class: 'item-head' }, verdict(table, i), h('span', {}, `step ${table.step[i]} · row ${table.problems[p][0]}`), h('b', {}, number(table.reward[i]))),
      h('span', { class: 'item-prompt' }, preview(table.texts[table.problems[p][1]])),
      h('span', { class: 'item-completion' }, preview(table.completion[i]) || '(empty)')));
}

function one(table, i, view, run, goTo) {
  const p = table.problem[i];
  const cells = table.episodes[i] || {};
  const columns = parsed(table.texts[table.columns[i]], {}) || {};
  const facts = [
    ['reward', number(table.reward[i])], ['advantage', number(table.advantage[i])],
    ...Object.entries(table.parts).map(([n, v]) => [n, number(v[i])]),
    ...Object.entries(table.extras).flatMap(([n, v]) => (v[i] === null || v[i] === undefined ? [] : [[n, typeof v[i] === 'number' ? number(v[i]) : String(v[i])]])),
    ['ended', cells.stop_reason || table.finish[i] || '–'],
    ...(hasTokens(table, i) ? [['tokens', whole.format(table.tokens[i].ids.length)]] : []),
  ];
  const rewards = { ...parsed(cells.env_rewards, {}), ...parsed(cells.env_metrics, {}) };
  return [
    h('header', { class: 'detail-head' },
      h('h3', {}, verdict(table, i), ` Step ${table.step[i]}, row ${table.problems[p][0]}, completion ${(table.sample[i] ?? 0) + 1}`),
      table.finish[i] === 'length' ? h('span', { class: 'pill warn' }, 'truncated') : null,
      hasFailed(table, i) ? h('span', { class: 'pill bad' }, 'failed') : null),
    h('dl', { class: 'facts small' }, [...facts, ...Object.entries(rewards).map(([k, v]) => [k, number(v)])].map(([k, v]) => h('div', {}, h('dt', {}, k), h('dd', {}, v)))),
    cells.env_error ? h('p', { class: 'error' }, cells.env_error) : null,
    h('div', { class: 'conversation' }, imagesOf(table, i), promptBoxes(table.texts[table.problems[p][1]]), completionBoxes(table, i, view.colours)),
    Object.keys(columns).length ? h('details', { open: Object.keys(columns).length < 4 }, h('summary', {}, 'Columns of the row'),
      grid([{ title: 'column' }, { title: 'value' }], Object.entries(columns).map(([k, v]) => [k, h('span', { class: 'value' }, typeof v === 'string' ? v : JSON.stringify(v))]), 'Columns of the row')) : null,
    others(table, i, goTo),
  ];
}

// The completions of the same problem, step by step.
function others(table, i, goTo) {
  table.byProblem ??= table.problem.reduce((all, p, k) => { (all[p] ??= []).push(k); return all; }, {});
  const all = table.byProblem[table.problem[i]];
  if (all.length < 2) return null;
  const bySteps = new Map();
  for (const k of all) bySteps.set(table.step[k], [...(bySteps.get(table.step[k]) || []), k]);
  const rows = [...bySteps];
  const every = (rows.length - 1) / (MOST_ROWS - 1);
  const spread = new Set(Array.from({ length: MOST_ROWS }, (_, k) => Math.round(k * every)));
  const shown = rows.length <= MOST_ROWS ? rows : rows.filter(([step], k) => spread.has(k) || step === table.step[i]);
  return h('section', { class: 'others' }, h('h4', {}, `The same problem: ${count(all.length, 'completion')} at ${count(bySteps.size, 'step')}${shown.length < rows.length ? `, of which ${shown.length} are shown` : ''}`),
    shown.map(([step, members]) => h('p', { class: 'dots' }, h('span', {}, `step ${step}`), members.map((k) => h('button', {
      type: 'button', class: `dot ${table.right ? (table.right[k] ? 'good' : 'bad') : 'plain'}`, 'aria-current': String(k === i),
      title: `completion ${(table.sample[k] ?? 0) + 1}: reward ${number(table.reward[k])}`, 'aria-label': `step ${step}, completion ${(table.sample[k] ?? 0) + 1}, reward ${number(table.reward[k])}`,
      onclick: () => goTo(k),
    })), h('span', { class: 'note' }, table.right ? `${members.filter((k) => table.right[k]).length} of ${members.length} right` : `mean reward ${number(mean(members.map((k) => table.reward[k])))}`))));
}
