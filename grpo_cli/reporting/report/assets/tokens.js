// Colours the tokens of a completion by their log-probability or by their advantage.

const MOST_TOKENS = 12000; // drawn of one completion

function hasTokens(data, i) {
  return Boolean(data.arrays && data.table.first_token[i] >= 0 && data.table.vocabulary);
}

// Returns the tokens from `from` to `to` of a completion as elements.
function tokenSpans(data, i, mode, from = 0, to = Infinity) {
  const { table, arrays } = data;
  const start = table.first_token[i];
  const end = Math.min(table.tokens[i], to, from + MOST_TOKENS);
  const scale = advantageScale(data);
  const spans = [];
  for (let at = from; at < end; at++) {
    const k = start + at;
    const text = table.vocabulary[arrays.ids[k]];
    const isForeign = arrays.foreign[k] === 1;
    const logprob = -arrays.logprobs[k] / 100;
    const advantage = arrays.advantages ? arrays.advantages[k] / 1000 : table.advantage[i];
    const tip = isForeign ? 'not sampled by the model'
      : `log-prob ${number(logprob)}, probability ${number(Math.exp(logprob))}${advantage === null ? '' : `, advantage ${number(advantage)}`}`;
    const span = h('span', { class: `token${isForeign ? ' foreign' : ''}`, title: `${JSON.stringify(text)}: ${tip}` }, visible(text));
    if (!isForeign && mode === 'logprob') span.style.background = `color-mix(in srgb, var(--unlikely) ${Math.round(70 * Math.min(1, -logprob / 4))}%, transparent)`;
    if (!isForeign && mode === 'advantage' && advantage) {
      span.style.background = `color-mix(in srgb, var(--${advantage > 0 ? 'gain' : 'loss'}) ${Math.round(12 + 55 * Math.min(1, Math.abs(advantage) / scale))}%, transparent)`;
    }
    spans.push(span);
  }
  if (end < Math.min(table.tokens[i], to)) spans.push(h('span', { class: 'note' }, ` … ${whole.format(Math.min(table.tokens[i], to) - end)} more tokens`));
  return spans;
}

function visible(text) {
  return text === '' ? '∅' : text.replace(/\n/g, '↵\n').replace(/\t/g, '⇥\t');
}

// The advantage that has the full colour: larger than 95 % of all.
function advantageScale(data) {
  if (!data.scale) {
    const sizes = data.table.advantage.map((v) => Math.abs(v ?? 0)).filter((v) => v > 0).sort((a, b) => a - b);
    data.scale = sizes[Math.floor(0.95 * (sizes.length - 1))] || 1;
  }
  return data.scale;
}

function colourLegend(mode) {
  if (mode === 'logprob') return h('p', { class: 'colour-legend' }, h('span', {}, 'likely'), h('i', { class: 'scale logprob' }), h('span', {}, 'unlikely (log-prob −4 and below)'));
  if (mode === 'advantage') return h('p', { class: 'colour-legend' }, h('span', {}, 'made less likely'), h('i', { class: 'scale advantage' }), h('span', {}, 'made more likely'));
  return null;
}
