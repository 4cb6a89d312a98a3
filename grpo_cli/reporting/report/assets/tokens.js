// Colours the tokens of a completion by their log-probability or by their advantage.

const MOST_TOKENS = 12000; // drawn of one completion

function hasTokens(table, i) {
  return Boolean(table.tokens[i]);
}

// Returns the tokens from `from` to `to` of a completion as elements.
function tokenSpans(table, i, mode, from = 0, to = Infinity) {
  const tokens = table.tokens[i];
  const length = tokens.ids.length;
  const end = Math.min(length, to, from + MOST_TOKENS);
  const scale = advantageScale(table);
  const spans = [];
  for (let at = from; at < end; at++) {
    const text = table.vocabulary[tokens.ids[at]];
    const isForeign = tokens.foreign?.[at] === 1;
    const logprob = -tokens.logprobs[at] / 100;
    const advantage = tokens.advantages ? tokens.advantages[at] / 1000 : table.advantage[i];
    const tip = isForeign ? 'not sampled by the model'
      : `log-prob ${number(logprob)}, probability ${number(Math.exp(logprob))}${advantage === null ? '' : `, advantage ${number(advantage)}`}`;
    const span = h('span', { class: `token${isForeign ? ' foreign' : ''}`, title: `${JSON.stringify(text)}: ${tip}` }, visible(text));
    if (!isForeign && mode === 'logprob') span.style.background = `color-mix(in srgb, var(--unlikely) ${Math.round(70 * Math.min(1, -logprob / 4))}%, transparent)`;
    if (!isForeign && mode === 'advantage' && advantage) {
      span.style.background = `color-mix(in srgb, var(--${advantage > 0 ? 'gain' : 'loss'}) ${Math.round(12 + 55 * Math.min(1, Math.abs(advantage) / scale))}%, transparent)`;
    }
    spans.push(span);
  }
  if (end < Math.min(length, to)) spans.push(h('span', { class: 'note' }, ` … ${whole.format(Math.min(length, to) - end)} more tokens`));
  return spans;
}

function visible(text) {
  return text === '' ? '∅' : text.replace(/\n/g, '↵\n').replace(/\t/g, '⇥\t');
}

// The advantage that has the full colour: larger than 95 % of all.
function advantageScale(table) {
  if (!table.scale) {
    const sizes = table.advantage.map((v) => Math.abs(v ?? 0)).filter((v) => v > 0).sort((a, b) => a - b);
    table.scale = sizes[Math.floor(0.95 * (sizes.length - 1))] || 1;
  }
  return table.scale;
}

function colourLegend(mode) {
  if (mode === 'logprob') return h('p', { class: 'colour-legend' }, h('span', {}, 'likely'), h('i', { class: 'scale logprob' }), h('span', {}, 'unlikely (log-prob −4 and below)'));
  if (mode === 'advantage') return h('p', { class: 'colour-legend' }, h('span', {}, 'made less likely'), h('i', { class: 'scale advantage' }), h('span', {}, 'made more likely'));
  return null;
}
