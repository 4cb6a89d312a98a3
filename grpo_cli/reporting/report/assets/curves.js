// The tab of curves: the usual ones, and any other metric by its name.

const USUAL = [
  ['reward', 'training reward'], ['reward_std', 'reward, standard deviation within a group'],
  ['frac_reward_zero_std', 'groups without a signal'], ['completions/mean_length', 'completion length (tokens)'],
  ['completions/clipped_ratio', 'truncated completions'], ['entropy', 'entropy (nats a token)'],
  ['kl', 'KL to the reference (nats a token)'], ['grad_norm', 'gradient norm'], ['loss', 'loss'],
  ['clip_ratio/region_mean', 'clipped tokens'], ['clip_ratio/low_mean', 'clipped at the lower end'],
  ['clip_ratio/high_mean', 'clipped at the upper end'], ['learning_rate', 'learning rate'],
  ['sampling/sampling_logp_difference/mean', 'log-probability, sampler against trainer'],
];

function metricNames() {
  const names = new Set(report.runs.flatMap((run) => Object.keys(run.curves.columns)));
  return [...names].filter((n) => !/_(low|high)$/.test(n) && report.runs.some((run) => column(run, n))).sort();
}

function curvesTab() {
  const names = metricNames();
  if (!names.length) return missing('No step is complete yet: there are no curves.');
  const isUsual = new Map(USUAL);
  const isEmpty = (n) => report.runs.every((run) => (column(run, n) || []).every((v) => !v));
  const chosen = new Set(USUAL.map(([n]) => n).filter((n) => names.includes(n) && !isEmpty(n)));
  const shown = new Map();
  const area = h('div', { class: 'charts' });
  const heldOut = heldOutChart();
  if (heldOut) area.append(heldOut);
  const add = (name) => {
    const box = metricChart(name, isUsual.get(name) || name);
    if (box) { shown.set(name, box); area.append(box); }
  };
  USUAL.forEach(([n]) => chosen.has(n) && add(n));
  const buttons = names.map((name) => {
    const button = h('button', {
      type: 'button', class: 'chip', 'aria-pressed': String(chosen.has(name)), 'data-name': name,
      onclick: () => {
        if (shown.has(name)) { shown.get(name).remove(); shown.delete(name); } else add(name);
        button.setAttribute('aria-pressed', String(shown.has(name)));
        for (const state of live) if (!state.host.isConnected) forget(state);
      },
    }, name);
    return button;
  });
  const search = h('input', {
    type: 'search', id: 'metric-search', placeholder: 'entropy, eval/, time/ …', autocomplete: 'off',
    oninput: () => {
      const wanted = search.value.trim().toLowerCase();
      let found = 0;
      for (const b of buttons) {
        b.hidden = Boolean(wanted) && !b.dataset.name.toLowerCase().includes(wanted);
        found += !b.hidden;
      }
      none.hidden = found > 0;
    },
  });
  const none = h('p', { class: 'missing', hidden: true }, 'No metric has this in its name.');
  const smooth = h('input', {
    type: 'range', min: '0', max: '0.98', step: '0.02', value: String(settings.smoothing), id: 'smoothing',
    oninput: () => { settings.smoothing = Number(smooth.value); redrawAll({ smoothing: settings.smoothing }); },
  });
  const every = Math.max(...report.runs.map((run) => run.curves.every));
  return h('div', { class: 'stack' },
    h('div', { class: 'toolbar' },
      h('label', { class: 'field' }, h('span', {}, 'Smoothing'), smooth),
      h('p', { class: 'note grow' }, `Drag across a chart to zoom in, double-click to zoom out.${every > 1 ? ` Each point is the mean of ${every} steps.` : ''}`)),
    area,
    card({ title: `All ${names.length} metrics`, note: 'Choose which curves are drawn. docs/metrics.md defines each.' },
      h('label', { class: 'field grow' }, h('span', {}, 'Find a metric'), search),
      h('div', { class: 'chips', role: 'group', 'aria-label': 'Metrics' }, buttons), none));
}
