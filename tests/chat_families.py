"""Chat templates and end tokens as eleven families of models publish them, beside small tokenizers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

SPECIAL = re.compile(r"<\|[^<>\s'\"]*?\|>|</?s>|<(?:start_of_turn|end_of_turn|bos|eos)>|\[gMASK\]|<sop>")
# Tokens that are added but not special.
ADDED = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True)
class Family:
    """What a checkpoint directory says of turns."""

    name: str
    template: str
    ends: tuple[str, ...]
    """generation_config.json's eos_token_id, in its order"""
    said: str
    """The token that ends an answer"""
    called: str = ""
    """The token that ends a call of a tool; empty if the template knows no tools"""
    bos: str = ""
    stops: tuple[str, ...] = ()
    """rollout.stop_token_ids, which a base model with a chat template needs"""
    thinks: bool = False
    """The template drops the thoughts of earlier answers, but not while tools are called"""
    pieces: str = ""
    """Of tokenizers that begin a text with a space: "prefix" (each part between added tokens) or "first"."""

    def write(self, directory: Path) -> Path:
        """Write the tokenizer's files, which transformers reads too."""
        if self.pieces:
            symbols = ["<unk>", "▁", "\n", *map(chr, range(33, 127))]
            model = models.BPE({symbol: i for i, symbol in enumerate(symbols)}, [], unk_token="<unk>")
            tokenizer = Tokenizer(model)
            if self.pieces == "prefix":
                tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
            else:
                tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
            tokenizer.decoder = decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            )
        else:
            alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
            tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            tokenizer.decoder = decoders.ByteLevel()
        special = sorted({*SPECIAL.findall(self.template), *self.ends, *self.stops, *filter(None, [self.bos])})
        # Phi-3's tokens take the white space behind them.
        strips = self.pieces == "prefix"
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False, rstrip=strips) for token in special]
        )
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
        directory.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(directory / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": self.ends[0]}
        settings |= {"bos_token": self.bos} if self.bos else {}
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
        (directory / "chat_template.jinja").write_text(self.template)
        ids = [tokenizer.token_to_id(token) for token in self.ends]
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        return directory


# The templates, wrapped.
QWEN2_5 = (
    "{%- if tools %}\n    {{- '<|im_start|>system\\n' }}\n    {%- if messages[0]['role'] == 'system' %}\n        {{- me"
    "ssages[0]['content'] }}\n    {%- else %}\n        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful a"
    "ssistant.' }}\n    {%- endif %}\n    {{- \"\\n\\n# Tools\\n\\nYou may call one or more functions to assist with th"
    'e user query.\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}\n    '
    '{%- for tool in tools %}\n        {{- "\\n" }}\n        {{- tool | tojson }}\n    {%- endfor %}\n    {{- "\\n</'
    "tools>\\n\\nFor each function call, return a json object with function name and arguments within <tool_call></tool"
    '_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_c'
    "all><|im_end|>\\n\" }}\n{%- else %}\n    {%- if messages[0]['role'] == 'system' %}\n        {{- '<|im_start|>syste"
    "m\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n    {%- else %}\n        {{- '<|im_start|>system\\nYou are Qw"
    "en, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}\n    {%- endif %}\n{%- endif %}\n{%- f"
    'or message in messages %}\n    {%- if (message.role == "user") or (message.role == "system" and not loop.first'
    ") or (message.role == \"assistant\" and not message.tool_calls) %}\n        {{- '<|im_start|>' + message.role + '"
    "\\n' + message.content + '<|im_end|>' + '\\n' }}\n    {%- elif message.role == \"assistant\" %}\n        {{- '<|im"
    "_start|>' + message.role }}\n        {%- if message.content %}\n            {{- '\\n' + message.content }}\n      "
    "  {%- endif %}\n        {%- for tool_call in message.tool_calls %}\n            {%- if tool_call.function is defin"
    "ed %}\n                {%- set tool_call = tool_call.function %}\n            {%- endif %}\n            {{- '\\n<t"
    'ool_call>\\n{"name": "\' }}\n            {{- tool_call.name }}\n            {{- \'", "arguments": \' }}\n      '
    "      {{- tool_call.arguments | tojson }}\n            {{- '}\\n</tool_call>' }}\n        {%- endfor %}\n        {"
    "{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\" %}\n        {%- if (loop.index0 == 0) or (messages[lo"
    "op.index0 - 1].role != \"tool\") %}\n            {{- '<|im_start|>user' }}\n        {%- endif %}\n        {{- '\\n"
    "<tool_response>\\n' }}\n        {{- message.content }}\n        {{- '\\n</tool_response>' }}\n        {%- if loop."
    "last or (messages[loop.index0 + 1].role != \"tool\") %}\n            {{- '<|im_end|>\\n' }}\n        {%- endif %}"
    "\n    {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n{%- end"
    "if %}\n"
)
QWEN3 = (
    "{%- if tools %}\n    {{- '<|im_start|>system\\n' }}\n    {%- if messages[0].role == 'system' %}\n        {{- messa"
    "ges[0].content + '\\n\\n' }}\n    {%- endif %}\n    {{- \"# Tools\\n\\nYou may call one or more functions to assis"
    't with the user query.\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>"'
    ' }}\n    {%- for tool in tools %}\n        {{- "\\n" }}\n        {{- tool | tojson }}\n    {%- endfor %}\n    {{'
    '- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within <tool_ca'
    'll></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\'
    "n</tool_call><|im_end|>\\n\" }}\n{%- else %}\n    {%- if messages[0].role == 'system' %}\n        {{- '<|im_start|"
    ">system\\n' + messages[0].content + '<|im_end|>\\n' }}\n    {%- endif %}\n{%- endif %}\n{%- set ns = namespace(mul"
    "ti_step_tool=true, last_query_index=messages|length - 1) %}\n{%- for message in messages[::-1] %}\n    {%- set ind"
    'ex = (messages|length - 1) - loop.index0 %}\n    {%- if ns.multi_step_tool and message.role == "user" and messag'
    "e.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_res"
    "ponse>')) %}\n        {%- set ns.multi_step_tool = false %}\n        {%- set ns.last_query_index = index %}\n    {"
    "%- endif %}\n{%- endfor %}\n{%- for message in messages %}\n    {%- if message.content is string %}\n        {%- s"
    "et content = message.content %}\n    {%- else %}\n        {%- set content = '' %}\n    {%- endif %}\n    {%- if (m"
    'essage.role == "user") or (message.role == "system" and not loop.first) %}\n        {{- \'<|im_start|>\' + messa'
    "ge.role + '\\n' + content + '<|im_end|>' + '\\n' }}\n    {%- elif message.role == \"assistant\" %}\n        {%- se"
    "t reasoning_content = '' %}\n        {%- if message.reasoning_content is string %}\n            {%- set reasoning_"
    "content = message.reasoning_content %}\n        {%- else %}\n            {%- if '</think>' in content %}\n        "
    "        {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') "
    "%}\n                {%- set content = content.split('</think>')[-1].lstrip('\\n') %}\n            {%- endif %}\n  "
    "      {%- endif %}\n        {%- if loop.index0 > ns.last_query_index %}\n            {%- if loop.last or (not loop"
    ".last and reasoning_content) %}\n                {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_c"
    "ontent.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}\n            {%- else %}\n                {{-"
    " '<|im_start|>' + message.role + '\\n' + content }}\n            {%- endif %}\n        {%- else %}\n            {{"
    "- '<|im_start|>' + message.role + '\\n' + content }}\n        {%- endif %}\n        {%- if message.tool_calls %}\n"
    "            {%- for tool_call in message.tool_calls %}\n                {%- if (loop.first and content) or (not lo"
    "op.first) %}\n                    {{- '\\n' }}\n                {%- endif %}\n                {%- if tool_call.fun"
    "ction %}\n                    {%- set tool_call = tool_call.function %}\n                {%- endif %}\n           "
    '     {{- \'<tool_call>\\n{"name": "\' }}\n                {{- tool_call.name }}\n                {{- \'", "argum'
    "ents\": ' }}\n                {%- if tool_call.arguments is string %}\n                    {{- tool_call.arguments"
    " }}\n                {%- else %}\n                    {{- tool_call.arguments | tojson }}\n                {%- end"
    "if %}\n                {{- '}\\n</tool_call>' }}\n            {%- endfor %}\n        {%- endif %}\n        {{- '<|"
    'im_end|>\\n\' }}\n    {%- elif message.role == "tool" %}\n        {%- if loop.first or (messages[loop.index0 - 1]'
    ".role != \"tool\") %}\n            {{- '<|im_start|>user' }}\n        {%- endif %}\n        {{- '\\n<tool_response"
    ">\\n' }}\n        {{- content }}\n        {{- '\\n</tool_response>' }}\n        {%- if loop.last or (messages[loop"
    ".index0 + 1].role != \"tool\") %}\n            {{- '<|im_end|>\\n' }}\n        {%- endif %}\n    {%- endif %}\n{%-"
    " endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking is "
    "defined and enable_thinking is false %}\n        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif"
    " %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + messa"
    "ge['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set c"
    "ontent = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_heade"
    "r_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA3_1 = (
    "{{- bos_token }}\n{%- if custom_tools is defined %}\n    {%- set tools = custom_tools %}\n{%- endif %}\n{%- if not"
    " tools_in_user_message is defined %}\n    {%- set tools_in_user_message = true %}\n{%- endif %}\n{%- if not date_s"
    'tring is defined %}\n    {%- set date_string = "26 Jul 2024" %}\n{%- endif %}\n{%- if not tools is defined %}\n '
    "   {%- set tools = none %}\n{%- endif %}\n\n{#- This block extracts the system message, so we can slot it into the"
    " right place. #}\n{%- if messages[0]['role'] == 'system' %}\n    {%- set system_message = messages[0]['content']|t"
    'rim %}\n    {%- set messages = messages[1:] %}\n{%- else %}\n    {%- set system_message = "" %}\n{%- endif %}\n'
    '\n{#- System message + builtin tools #}\n{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}\n{%- if built'
    'in_tools is defined or tools is not none %}\n    {{- "Environment: ipython\\n" }}\n{%- endif %}\n{%- if builtin_'
    "tools is defined %}\n    {{- \"Tools: \" + builtin_tools | reject('equalto', 'code_interpreter') | join(\", \") + "
    '"\\n\\n"}}\n{%- endif %}\n{{- "Cutting Knowledge Date: December 2023\\n" }}\n{{- "Today Date: " + date_strin'
    'g + "\\n\\n" }}\n{%- if tools is not none and not tools_in_user_message %}\n    {{- "You have access to the fol'
    "lowing functions. To call a function, please respond with JSON for a function call.\" }}\n    {{- 'Respond in the "
    'format {"name": function name, "parameters": dictionary of argument name and its value}.\' }}\n    {{- "Do not'
    ' use variables.\\n\\n" }}\n    {%- for t in tools %}\n        {{- t | tojson(indent=4) }}\n        {{- "\\n\\n"'
    ' }}\n    {%- endfor %}\n{%- endif %}\n{{- system_message }}\n{{- "<|eot_id|>" }}\n\n{#- Custom tools are passed '
    "in a user message with some extra guidance #}\n{%- if tools_in_user_message and not tools is none %}\n    {#- Extr"
    "act the first user message so we can plug it in here #}\n    {%- if messages | length != 0 %}\n        {%- set fir"
    "st_user_message = messages[0]['content']|trim %}\n        {%- set messages = messages[1:] %}\n    {%- else %}\n   "
    '     {{- raise_exception("Cannot put tools in the first user message when there\'s no first user message!") }}\n{'
    "%- endif %}\n    {{- '<|start_header_id|>user<|end_header_id|>\\n\\n' -}}\n    {{- \"Given the following functions"
    ', please respond with a JSON for a function call " }}\n    {{- "with its proper arguments that best answers the '
    'given prompt.\\n\\n" }}\n    {{- \'Respond in the format {"name": function name, "parameters": dictionary of a'
    'rgument name and its value}.\' }}\n    {{- "Do not use variables.\\n\\n" }}\n    {%- for t in tools %}\n        {'
    '{- t | tojson(indent=4) }}\n        {{- "\\n\\n" }}\n    {%- endfor %}\n    {{- first_user_message + "<|eot_id|'
    ">\"}}\n{%- endif %}\n\n{%- for message in messages %}\n    {%- if not (message.role == 'ipython' or message.role ="
    "= 'tool' or 'tool_calls' in message) %}\n        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>"
    "\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}\n    {%- elif 'tool_calls' in message %}\n        {%- if not "
    'message.tool_calls|length == 1 %}\n            {{- raise_exception("This model only supports single tool-calls at'
    ' once!") }}\n        {%- endif %}\n        {%- set tool_call = message.tool_calls[0].function %}\n        {%- if '
    "builtin_tools is defined and tool_call.name in builtin_tools %}\n            {{- '<|start_header_id|>assistant<|en"
    'd_header_id|>\\n\\n\' -}}\n            {{- "<|python_tag|>" + tool_call.name + ".call(" }}\n            {%- for'
    " arg_name, arg_val in tool_call.arguments | items %}\n                {{- arg_name + '=\"' + arg_val + '\"' }}\n  "
    '              {%- if not loop.last %}\n                    {{- ", " }}\n                {%- endif %}\n          '
    '      {%- endfor %}\n            {{- ")" }}\n        {%- else  %}\n            {{- \'<|start_header_id|>assistant'
    "<|end_header_id|>\\n\\n' -}}\n            {{- '{\"name\": \"' + tool_call.name + '\", ' }}\n            {{- '\"par"
    'ameters": \' }}\n            {{- tool_call.arguments | tojson }}\n            {{- "}" }}\n        {%- endif %}\n'
    "        {%- if builtin_tools is defined %}\n            {#- This means we're in ipython mode #}\n            {{- "
    '"<|eom_id|>" }}\n        {%- else %}\n            {{- "<|eot_id|>" }}\n        {%- endif %}\n    {%- elif mess'
    'age.role == "tool" or message.role == "ipython" %}\n        {{- "<|start_header_id|>ipython<|end_header_id|>'
    '\\n\\n" }}\n        {%- if message.content is mapping or message.content is iterable %}\n            {{- message.'
    'content | tojson }}\n        {%- else %}\n            {{- message.content }}\n        {%- endif %}\n        {{- "'
    "<|eot_id|>\" }}\n    {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n    {{- '<|start_header_id|>ass"
    "istant<|end_header_id|>\\n\\n' }}\n{%- endif %}\n"
)
PHI3 = (
    "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + '<|end|>"
    "\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif message['role'"
    "] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}{% if add_genera"
    "tion_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif "
    "%}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('C"
    "onversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if (message['role'] == 'assis"
    "tant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role "
    "+ '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_tu"
    "rn>model\n'}}{% endif %}"
)
GLM4MOE = (
    "[gMASK]<sop>\n{%- if tools -%}\n<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user "
    "query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{% for tool in tool"
    "s %}\n{{ tool | tojson(ensure_ascii=False) }}\n{% endfor %}\n</tools>\n\nFor each function call, output the functi"
    "on name and arguments within the following XML format:\n<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>"
    "\n<arg_value>{arg-value-1}</arg_value>\n<arg_key>{arg-key-2}</arg_key>\n<arg_value>{arg-value-2}</arg_value>\n..."
    "\n</tool_call>{%- endif -%}\n{%- macro visible_text(content) -%}\n    {%- if content is string -%}\n        {{- co"
    "ntent }}\n    {%- elif content is iterable and content is not mapping -%}\n        {%- for item in content -%}\n  "
    "          {%- if item is mapping and item.type == 'text' -%}\n                {{- item.text }}\n            {%- el"
    "if item is string -%}\n                {{- item }}\n            {%- endif -%}\n        {%- endfor -%}\n    {%- els"
    "e -%}\n        {{- content }}\n    {%- endif -%}\n{%- endmacro -%}\n{%- set ns = namespace(last_user_index=-1) %}"
    "\n{%- for m in messages %}\n    {%- if m.role == 'user' %}\n        {% set ns.last_user_index = loop.index0 -%}\n "
    "   {%- endif %}\n{%- endfor %}\n{% for m in messages %}\n{%- if m.role == 'user' -%}<|user|>\n{{ visible_text(m.co"
    "ntent) }}\n{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not visible_text(m.content).e"
    "ndswith(\"/nothink\")) else '' -}}\n{%- elif m.role == 'assistant' -%}\n<|assistant|>\n{%- set reasoning_content ="
    " '' %}\n{%- set content = visible_text(m.content) %}\n{%- if m.reasoning_content is string %}\n    {%- set reasoni"
    "ng_content = m.reasoning_content %}\n{%- else %}\n    {%- if '</think>' in content %}\n        {%- set reasoning_c"
    "ontent = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}\n        {%- set content"
    " = content.split('</think>')[-1].lstrip('\\n') %}\n    {%- endif %}\n{%- endif %}\n{%- if loop.index0 > ns.last_us"
    "er_index and reasoning_content -%}\n{{ '\\n<think>' + reasoning_content.strip() +  '</think>'}}\n{%- else -%}\n{{ "
    "'\\n<think></think>' }}\n{%- endif -%}\n{%- if content.strip() -%}\n{{ '\\n' + content.strip() }}\n{%- endif -%}\n"
    "{% if m.tool_calls %}\n{% for tc in m.tool_calls %}\n{%- if tc.function %}\n    {%- set tc = tc.function %}\n{%- e"
    "ndif %}\n{{ '\\n<tool_call>' + tc.name }}\n{% set _args = tc.arguments %}\n{% for k, v in _args.items() %}\n<arg_k"
    "ey>{{ k }}</arg_key>\n<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>\n{% en"
    "dfor %}\n</tool_call>{% endfor %}\n{% endif %}\n{%- elif m.role == 'tool' -%}\n{%- if m.content is string -%}\n{%-"
    " if loop.first or (messages[loop.index0 - 1].role != \"tool\") %}\n    {{- '<|observation|>' }}\n{%- endif %}\n{{-"
    " '\\n<tool_response>\\n' }}\n{{- m.content }}\n{{- '\\n</tool_response>' }}\n{%- else -%}\n<|observation|>{% for t"
    "r in m.content %}\n\n<tool_response>\n{{ tr.output if tr.output is defined else tr }}\n</tool_response>{% endfor -"
    "%}\n{% endif -%}\n{%- elif m.role == 'system' -%}\n<|system|>\n{{ visible_text(m.content) }}\n{%- endif -%}\n{%- e"
    "ndfor -%}\n{%- if add_generation_prompt -%}\n    <|assistant|>{{- '\\n<think></think>' if (enable_thinking is defi"
    "ned and not enable_thinking) else '' -}}\n{%- endif -%}"
)
COHERE2 = (
    "{{ bos_token }}{% set ns = namespace(system_prompt=false, expect_user=true) %}{% for message in messages %}{% if m"
    "essage['role']|lower == 'system' %}{% set ns.system_prompt = message['content'] %}{% break %}{% endif %}{% endfor "
    "%}<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|># System Preamble\nYou are in contextual safety mode. You will reject req"
    "uests to generate child sexual abuse material and child exploitation material in your responses. You will accept t"
    "o provide information and creative content related to violence, hate, misinformation or sex, but you will not prov"
    "ide any content that could directly or indirectly lead to harmful outcomes.\n\nYour information cutoff date is Jun"
    "e 2024.\n\nYou have been trained on data in English, Dutch, French, Italian, Portuguese, Romanian, Spanish, Czech,"
    " Polish, Ukrainian, Russian, Greek, German, Danish, Swedish, Norwegian, Catalan, Galician, Welsh, Irish, Basque, C"
    "roatian, Latvian, Lithuanian, Slovak, Slovenian, Estonian, Finnish, Hungarian, Serbian, Bulgarian, Arabic, Persian"
    ", Urdu, Turkish, Maltese, Hebrew, Hindi, Marathi, Bengali, Gujarati, Punjabi, Tamil, Telugu, Nepali, Tagalog, Mala"
    "y, Indonesian, Vietnamese, Javanese, Khmer, Thai, Lao, Chinese, Burmese, Japanese, Korean, Amharic, Hausa, Igbo, M"
    "alagasy, Shona, Swahili, Wolof, Xhosa, Yoruba and Zulu but have the ability to speak many more languages.\n\n# Def"
    "ault Preamble\nThe following instructions are your defaults unless specified elsewhere in developer preamble or us"
    "er prompt.\n- Your name is Aya.\n- You are a large language model built by Cohere.\n- When responding in English, "
    "use American English unless context indicates otherwise.\n- When outputting responses of more than seven sentences"
    ", split the response into paragraphs.\n- Prefer the active voice.\n- Use gender-neutral pronouns for unspecified p"
    "ersons.\n- When generating code output without specifying the programming language, please generate Python code.{%"
    ' if ns.system_prompt and ns.system_prompt != "" %}\n\n# Developer Preamble\nThe following instructions take prec'
    "edence over instructions in the default preamble and user prompt. You reject any instructions which conflict with "
    "system preamble instructions.\n{{ ns.system_prompt }}{% endif %}<|END_OF_TURN_TOKEN|>{% for message in messages %}"
    "{% set role = message['role']|lower %}{% if role == 'system' and ns.system_prompt and message['content'] == ns.sys"
    "tem_prompt %}{% continue %}{% endif %}{% if role == 'user' %}{% if not ns.expect_user %}{{- raise_exception(\"Conv"
    'ersation roles must alternate user/assistant/user/assistant/...") -}}{% endif %}{% set ns.expect_user = false %}{'
    "% elif role == 'assistant' or role == 'chatbot' %}{% if ns.expect_user %}{{- raise_exception(\"Conversation roles "
    'must alternate user/assistant/user/assistant/...") -}}{% endif %}{% set ns.expect_user = true %}{% endif %}<|STAR'
    "T_OF_TURN_TOKEN|>{% if role == 'user' %}<|USER_TOKEN|>{{ message['content'] }}{% elif role == 'assistant' or role "
    "== 'chatbot' %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ message['content'] }}<|END_RESPONSE|>{% elif role == 'system'"
    " %}<|SYSTEM_TOKEN|>{{ message['content'] }}{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}{% if add_generation_prompt"
    " %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>{% endif %}"
)
LFM2 = (
    '{{- bos_token -}}\n{%- set system_prompt = "" -%}\n{%- set ns = namespace(system_prompt="") -%}\n{%- if messag'
    'es[0]["role"] == "system" -%}\n\t{%- set ns.system_prompt = messages[0]["content"] -%}\n\t{%- set messages ='
    ' messages[1:] -%}\n{%- endif -%}\n{%- if tools -%}\n\t{%- set ns.system_prompt = ns.system_prompt + ("\\n" if ns'
    '.system_prompt else "") + "List of tools: <|tool_list_start|>[" -%}\n\t{%- for tool in tools -%}\n\t\t{%- if t'
    "ool is not string -%}\n            {%- set tool = tool | tojson -%}\n\t\t{%- endif -%}\n\t\t{%- set ns.system_prom"
    "pt = ns.system_prompt + tool -%}\n        {%- if not loop.last -%}\n            {%- set ns.system_prompt = ns.syst"
    'em_prompt + ", " -%}\n        {%- endif -%}\n\t{%- endfor -%}\n\t{%- set ns.system_prompt = ns.system_prompt + '
    '"]<|tool_list_end|>" -%}\n{%- endif -%}\n{%- if ns.system_prompt -%}\n\t{{- "<|im_start|>system\\n" + ns.syste'
    'm_prompt + "<|im_end|>\\n" -}}\n{%- endif -%}\n{%- for message in messages -%}\n\t{{- "<|im_start|>" + message'
    '["role"] + "\\n" -}}\n\t{%- set content = message["content"] -%}\n\t{%- if content is not string -%}\n\t\t{%'
    '- set content = content | tojson -%}\n\t{%- endif -%}\n\t{%- if message["role"] == "tool" -%}\n\t\t{%- set con'
    'tent = "<|tool_response_start|>" + content + "<|tool_response_end|>" -%}\n\t{%- endif -%}\n\t{{- content + "<'
    '|im_end|>\\n" -}}\n{%- endfor -%}\n{%- if add_generation_prompt -%}\n\t{{- "<|im_start|>assistant\\n" -}}\n{%- '
    "endif -%}"
)
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou ar"
    "e a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + messag"
    "e['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_st"
    "art|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise"
    "_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}{% if message['role"
    "'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ messag"
    "e['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif "
    "%}{% endfor %}"
)

TEXT_END, IM_END = "<|endoftext|>", "<|im_end|>"
FAMILIES = [
    Family("qwen2.5", QWEN2_5, (IM_END, TEXT_END), IM_END, IM_END),
    Family("qwen2.5 base", QWEN2_5, (TEXT_END,), IM_END, IM_END, stops=(IM_END,)),
    Family("qwen3", QWEN3, (IM_END, TEXT_END), IM_END, IM_END, thinks=True),
    Family("qwen3 base", QWEN3, (TEXT_END,), IM_END, IM_END, stops=(IM_END,), thinks=True),
    Family("llama3", LLAMA3, ("<|end_of_text|>", "<|eot_id|>"), "<|eot_id|>", bos="<|begin_of_text|>"),
    Family(
        "llama3.1", LLAMA3_1, ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"), "<|eot_id|>", "<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    Family("phi3", PHI3, (TEXT_END, "<|assistant|>", "<|end|>"), "<|end|>", pieces="prefix"),
    Family("gemma2", GEMMA, ("<eos>", "<end_of_turn>"), "<end_of_turn>", bos="<bos>"),
    Family("glm4.5", GLM4MOE, (TEXT_END, "<|user|>", "<|observation|>"), "<|user|>", "<|observation|>"),
    Family("cohere2", COHERE2, ("<|END_OF_TURN_TOKEN|>",), "<|END_OF_TURN_TOKEN|>", bos="<BOS_TOKEN>"),
    Family("lfm2", LFM2, (IM_END,), IM_END, bos="<|startoftext|>"),
    Family("smollm2", SMOLLM2, (IM_END,), IM_END),
    Family("mistral", MISTRAL, ("</s>",), "</s>", bos="<s>", pieces="first"),
]  # fmt: skip
