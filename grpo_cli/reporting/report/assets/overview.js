// The first tab: the run's facts and state, and its results before and after.

const STATES = {
  finished: ['finished', 'good'], running: ['running', 'info'], stopped: ['stopped', 'warn'], failed: ['failed', 'bad'],
  ended: ['ended without a summary', 'warn'],
};

function overviewTab() {
  return h('div', { class: 'stack' },
    h('div', { class: report.two ? 'heroes' : 'stack' }, report.runs.map((run, i) => hero(run, i))),
    report.runs.some((run) => run.curves.steps.length) ? null : missing('No step is complete yet: there are no curves.'),
    alarmsCard(),
    h('div', { class: 'charts two' },
      metricChart('reward', 'training reward'), heldOutChart(),
      metricChart('completions/mean_length', 'completion length (tokens)'),
      metricChart('entropy', 'entropy (nats a token)'), metricChart('grad_norm', 'gradient norm'),
      metricChart('kl', 'KL to the reference (nats a token)')
        || metricChart('frac_reward_zero_std', 'groups without a signal', PERCENT)),
    report.runs.map((run) => evaluationsCard(run)),
    report.runs.map((run) => whatWasRun(run)));
}

function hero(run, i) {
  const found = evaluations(run);
  const first = found.find((e) => e.step === 0);
  const last = found.filter((e) => e.step > 0).pop();
  const isShare = run.measure === 'accuracy';
  const format = isShare ? (v) => share(v) : number;
  let headline;
  if (first && last) {
    headline = [
      h('p', { class: 'eyebrow' }, `Held-out ${run.measure}, before and after ${count(last.step, 'step')}`),
      h('p', { class: 'big' }, h('span', { class: 'was' }, format(first.value)), h('span', { class: 'arrow', 'aria-label': 'to' }, '→'), h('strong', {}, format(last.value))),
      h('p', { class: `delta ${last.value >= first.value ? 'good' : 'bad'}` }, isShare ? `${plus(100 * (last.value - first.value), (v) => number(v, 3))} points` : plus(last.value - first.value)),
      last.low === null && first.low === null ? null : h('p', { class: 'note' }, `before${interval(first, format)}, after${interval(last, format)}`),
    ];
  } else {
    const reward = tenths(run, 'reward');
    headline = [
      h('p', { class: 'eyebrow' }, 'Training reward, first and last tenth of the steps'),
      reward ? h('p', { class: 'big' }, h('span', { class: 'was' }, number(reward.first)), h('span', { class: 'arrow', 'aria-label': 'to' }, '→'), h('strong', {}, number(reward.last)))
        : h('p', { class: 'big' }, 'not recorded'),
      last ? h('p', { class: 'note' }, `Held-out ${run.measure} at step ${last.step}: ${format(last.value)}${interval(last, format)}. There is no evaluation before training.`)
        : missing('No evaluation is recorded.'),
    ];
  }
  const done = run.curves.steps[run.curves.steps.length - 1] || 0;
  const spent = run.summary ? run.summary.seconds : sum(run.curves.columns.step_time || []) * run.curves.every;
  const tokens = (run.curves.columns.num_tokens || []).filter((v) => v !== null).pop();
  const [state, tone] = STATES[run.state];
  const facts = [
    ['recipe', run.recipe || '–'], ['steps', `${whole.format(done)} of ${run.steps ? whole.format(run.steps) : '?'}`],
    [run.summary ? 'time' : 'time in steps', seconds(spent)], ['tokens', tokens ? short(tokens) : '–'],
    ['device', run.device ?? 'not recorded'], ['processes', run.processes ?? 'not recorded'],
  ];
  return h('section', { class: `hero run-${i}`, 'aria-label': `Results of ${run.label}` },
    h('div', { class: 'hero-main' }, report.two ? h('p', { class: 'run-name' }, h('i', {}), run.label) : null, headline),
    h('div', { class: 'hero-side' },
      h('p', { class: 'hero-state' }, h('span', { class: `pill ${tone}` }, state), run.description ? h('span', { class: 'note' }, run.description) : null),
      run.message ? h('p', { class: 'error' }, run.message) : null,
      h('dl', { class: 'facts' }, facts.map(([k, v]) => h('div', {}, h('dt', {}, k), h('dd', {}, String(v)))))));
}

function short(n) {
  for (const [size, unit] of [[1e12, 'T'], [1e9, 'B'], [1e6, 'M'], [1e3, 'k']]) if (n >= size) return `${number(n / size, 3)} ${unit}`;
  return String(n);
}

function interval(e, format) {
  return e.low === null ? '' : ` (95 % interval ${format(e.low)} to ${format(e.high)})`;
}

function alarmsCard() {
  const all = report.runs.flatMap((run) => (run.alarms || []).map((a) => ({ ...a, run: run.label })));
  if (!all.length) return null;
  const shown = all.slice(0, 50);
  return card({ title: `Alarms (${all.length})`, id: 'alarms', note: 'Marked on the curves by dashed lines.' },
    h('ul', { class: 'alarms' }, shown.map((a) => h('li', { class: a.kind === 'stop' ? 'bad' : 'warn' },
      h('b', {}, `${report.two ? `${a.run}, ` : ''}step ${a.step}`), h('span', { class: 'pill' }, a.name), h('span', {}, sentenceOf(a))))),
    all.length > shown.length ? h('p', { class: 'note' }, `and ${all.length - shown.length} more`) : null);
}

// Returns an alarm's message without its step, which stands beside it.
function sentenceOf(alarm) {
  const step = `step ${alarm.step}: `;
  return alarm.message.startsWith(step) ? alarm.message.slice(step.length) : alarm.message;
}

function evaluationsCard(run) {
  if (!run.evaluations.length) return null;
  const rows = run.evaluations.map((e) => [e.name, e.step, e.n, share(e.accuracy), e.interval ? `${share(e.interval[0])} – ${share(e.interval[1])}` : '–', number(e.reward)]);
  const title = report.two ? `Evaluations by grpo eval: ${run.label}` : 'Evaluations by grpo eval';
  return card(title, grid([{ title: 'benchmark' }, ...['step', 'problems', 'accuracy', '95 % interval', 'reward'].map((t) => ({ title: t, number: true }))], rows, title));
}

function whatWasRun(run) {
  const summary = run.summary || {};
  const machine = summary.machine || {};
  const rows = [
    ['folder', run.folder], ['seed', summary.seed], ['device', summary.device],
    ...Object.entries(machine).map(([k, v]) => [k, k === 'memory' ? bytes(v) : String(v)]),
    ...Object.entries(summary.versions || {}).map(([k, v]) => [k.replace('grpo_cli', 'grpo'), v]),
    ['last checkpoint', inside(run, summary.last_checkpoint)],
    ['best checkpoint', summary.best_checkpoint && `${inside(run, summary.best_checkpoint)} (${summary.best_metric} ${number(summary.best_value)})`],
  ].filter(([, v]) => v !== undefined && v !== null);
  return card(report.two ? `What was run: ${run.label}` : 'What was run',
    commands(run),
    h('dl', { class: 'facts wide' }, rows.map(([k, v]) => h('div', {}, h('dt', {}, k), h('dd', {}, String(v))))),
    run.summary ? null : missing('Versions and machine are written when a run ends.'));
}

function inside(run, path) {
  return path && path.startsWith(`${run.folder}/`) ? path.slice(run.folder.length + 1) : path;
}

function commands(run) {
  if (!run.commands.length) return missing('The command line is not recorded.');
  return h('div', { class: 'commands' }, run.commands.map((c, i) => h('pre', { class: 'command' },
    run.commands.length > 1 ? h('span', { class: 'note' }, `start ${i + 1}  `) : null, h('code', {}, c))));
}
