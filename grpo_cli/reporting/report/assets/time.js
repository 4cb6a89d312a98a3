// The tab of time: stages of a step, idle share, and the plan beside the measurements.

const STAGES = ['generate', 'reward', 'old_logprobs', 'ref_logprobs', 'forward_backward', 'optimizer', 'weights', 'idle'];
const STAGE_NAMES = {
  generate: 'generate', reward: 'reward', old_logprobs: 'old log-probs', ref_logprobs: 'reference log-probs',
  forward_backward: 'forward and backward', optimizer: 'optimizer', weights: 'weights', idle: 'idle', other: 'other',
};

const PERCENT = { format: (v) => share(v), axis: (v) => share(v, 0) };

function stagesOf(run) {
  const total = run.curves.columns.step_time;
  if (!total) return null;
  const found = STAGES.flatMap((stage) => {
    const values = run.curves.columns[`time/${stage}`];
    return values && values.some((v) => v) ? [{ stage, values: values.map((v) => v ?? 0) }] : [];
  });
  const rest = total.map((t, i) => Math.max(0, (t ?? 0) - sum(found.map((f) => f.values[i]))));
  if (found.length) found.push({ stage: 'other', values: rest });
  return found.length ? found : null;
}

function timeTab() {
  return h('div', { class: 'stack' },
    report.runs.map((run) => timeCard(run)),
    h('div', { class: 'charts' }, metricChart('tokens_per_second', 'tokens a second'),
      metricChart('mfu/forward_backward', 'MFU of forward and backward', PERCENT),
      metricChart('mfu/generate', 'MFU of sampling', PERCENT)),
    report.runs.map((run) => planCard(run)));
}

function timeCard(run) {
  const stages = stagesOf(run);
  const title = report.two ? `Time of a step: ${run.label}` : 'Time of a step';
  if (!stages) return card(title, missing('The time by stage is not recorded.'));
  const total = sum(run.curves.columns.step_time) * run.curves.every;
  const rows = stages.map(({ stage, values }) => ({ stage, seconds: sum(values) * run.curves.every }));
  const idle = rows.find((r) => r.stage === 'idle');
  const rest = run.summary ? Math.max(0, run.summary.seconds - total) : null;
  const bar = h('div', { class: 'bar', role: 'img', 'aria-label': rows.map((r) => `${STAGE_NAMES[r.stage]} ${share(r.seconds / total)}`).join(', ') },
    rows.map((r) => h('i', { style: { width: `${100 * r.seconds / total}%`, background: `var(--stage-${r.stage})` }, title: `${STAGE_NAMES[r.stage]}: ${share(r.seconds / total)}` })));
  const lines = stages.map(({ stage, values }) => ({
    label: STAGE_NAMES[stage], x: run.curves.steps, ink: `stage-${stage}`, values,
  }));
  const areas = chart({
    title: 'seconds a step by stage', lines, wide: true, height: 260,
    smoothing: settings.smoothing, alarms: run.alarms || [], format: seconds, axis: seconds,
  });
  return card(title,
    bar,
    h('ul', { class: 'legend stages' }, rows.map((r) => h('li', {}, h('i', { style: { background: `var(--stage-${r.stage})` } }), `${STAGE_NAMES[r.stage]} `, h('b', {}, share(r.seconds / total)), h('span', {}, seconds(r.seconds))))),
    areas,
    h('dl', { class: 'facts' },
      [['in steps', seconds(total)], ['evaluation, saving and the rest', rest === null ? 'not recorded' : `${seconds(rest)} (${share(rest / run.summary.seconds)})`],
        ['a step, median', seconds(median(run.curves.columns.step_time))], ['idle', idle ? share(idle.seconds / total) : 'one process: none'],
      ].map(([k, v]) => h('div', {}, h('dt', {}, k), h('dd', {}, v)))));
}

function median(values) {
  const known = values.filter((v) => v !== null).sort((a, b) => a - b);
  return known.length ? known[Math.floor(known.length / 2)] : null;
}

function planCard(run) {
  const title = report.two ? `Plan and measurement: ${run.label}` : 'Plan and measurement';
  if (!run.plan || !run.plan.predicted) return card(title, missing(`Not recorded: ${run.plan?.unpredicted || 'the run has no plan.json'}.`));
  const { predicted } = run.plan;
  const measured = run.plan.measured || {};
  const rows = [];
  const add = (name, key, format) => {
    const [a, b] = [key(predicted), key(measured)];
    if (a === undefined && b === undefined) return;
    rows.push([name, format(a), b === undefined || b === null ? '–' : format(b), difference(a, b)]);
  };
  add('peak of memory', (p) => p.peak, bytes);
  for (const stage of Object.keys({ ...predicted.memory, ...measured.memory })) add(`memory, ${stage.replaceAll('_', ' ')}`, (p) => p.memory?.[stage], bytes);
  add('tokens a step', (p) => p.tokens_per_step, (v) => number(v));
  add('tokens a micro-batch', (p) => p.tokens_per_micro_batch, (v) => number(v));
  return card({ title, note: predicted.device ? `Predicted for ${predicted.device}.` : null },
    grid([{ title: '' }, { title: 'predicted', number: true }, { title: 'measured', number: true }, { title: 'error', number: true }], rows, title),
    run.plan.measured ? null : missing('Nothing is measured yet.'));
}

function difference(a, b) {
  if (!a || !b) return '–';
  const error = a / b - 1;
  return h('span', { class: Math.abs(error) > 0.25 ? 'bad' : 'good' }, plus(error, (v) => share(v, 0)));
}
